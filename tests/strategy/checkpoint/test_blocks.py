"""Blocks of a chunk: their order in the file, checksums, and the bytes that a region needs."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from weft.strategy.checkpoint import blocks as blocks_module
from weft.strategy.checkpoint.blocks import Blocks, bytes_of, checksum

KIB = 1 << 10
SHAPES = [(), (0,), (5,), (7, 0, 3), (3, 5), (1, 1 << 16), (1 << 16, 1), (300, 512), (96, 30, 40), (2, 3, 1 << 14)]


def _stored(values: Tensor, blocks: Blocks) -> tuple[bytes, list[int]]:
    """Return the bytes of a chunk in the order of the file, and all checksums."""
    data, checksums = bytearray(), []
    for part, of_part in blocks.parts(values):
        data += part
        checksums += of_part
    return bytes(data), checksums


@pytest.mark.parametrize("part_bytes", [1, 40_000, 1 << 20])
@pytest.mark.parametrize("shape", SHAPES)
def test_stored_values_are_a_permutation_in_panels(
    shape: tuple[int, ...], part_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks_module, "_PART_BYTES", part_bytes)
    values = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    blocks = Blocks.of(shape, 4)
    data, checksums = _stored(values, blocks)
    assert len(data) == values.nbytes and len(checksums) == blocks.num_blocks <= 8192
    panels = values.reshape(blocks.num_rows, blocks.num_panels, -1) if values.numel() > 0 else values
    expected = panels.transpose(0, 1).contiguous() if values.numel() > 0 else values
    assert math.prod(blocks.stored_shape) == values.numel() and data == bytes(bytes_of(expected))
    start = 0
    for panel in range(blocks.num_panels if data else 0):
        for first in range(0, blocks.num_rows, blocks.block_rows):
            num_bytes = min(blocks.block_rows, blocks.num_rows - first) * blocks.row_bytes
            idx = panel * blocks.blocks_per_panel + first // blocks.block_rows
            assert checksums[idx] == checksum(data[start : start + num_bytes])
            start += num_bytes
    assert start == len(data)


@settings(max_examples=200, deadline=None)
@given(
    shape=st.lists(st.integers(1, 600), min_size=1, max_size=3),
    itemsize=st.sampled_from([1, 2, 4, 8]),
    data=st.data(),
)
def test_spans_cover_a_region_once(shape: list[int], itemsize: int, data: st.DataObject) -> None:
    """Every element of the region is in one span; spans have whole blocks, and are limited in size."""
    blocks = Blocks.of(tuple(shape), itemsize)
    rows, columns = blocks.num_rows, blocks.num_columns
    first_row, first_column = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
    region_rows = (first_row, data.draw(st.integers(first_row + 1, rows)))
    region_columns = (first_column, data.draw(st.integers(first_column + 1, columns)))
    max_bytes = data.draw(st.sampled_from([1, 64 * KIB, 4096 * KIB]))
    min_read_bytes = data.draw(st.sampled_from([1, 64 * KIB, max_bytes]))
    found = torch.zeros(rows, columns, dtype=torch.int32)
    order = torch.arange(rows * columns, dtype=torch.int32).reshape(rows, columns)
    data, _ = _stored(order, Blocks((rows, columns), 4, blocks.num_panels, blocks.block_rows))
    stored = torch.frombuffer(bytearray(data), dtype=torch.int32)
    trailing = blocks.num_bytes // (rows * columns)  # bytes at each row and column
    bands = list(blocks.bands(region_rows, region_columns, max_bytes, min_read_bytes))
    for band in bands:
        assert len({(span.rows, span.num_bytes) for span in band}) == 1
        assert all(before.columns[1] == after.columns[0] for before, after in itertools.pairwise(band))
        assert len(band) == 1 or sum(span.num_bytes for span in band) <= max_bytes
    for span in itertools.chain(*bands):
        block_bytes = blocks.block_rows * blocks.row_bytes
        assert 0 < span.num_bytes <= max(max_bytes, block_bytes)
        assert span.first_byte % trailing == span.num_bytes % trailing == 0
        part = stored[span.first_byte // trailing : (span.first_byte + span.num_bytes) // trailing]
        expected = order[slice(*span.rows), slice(*span.columns)]
        assert torch.equal(part.reshape(expected.shape), expected)
        found[slice(*span.rows), slice(*span.columns)] += 1
        assert (span.first_byte - span.first_block // blocks.blocks_per_panel * rows * blocks.row_bytes) == (
            span.first_block % blocks.blocks_per_panel * block_bytes
        )
    assert found.max() == 1 and (found[slice(*region_rows), slice(*region_columns)] == 1).all()


@pytest.mark.parametrize("shape", [(40, 3), (300, 512), (1, 1 << 16), (9,)])
def test_a_flipped_bit_damages_its_block(shape: tuple[int, ...]) -> None:
    blocks = Blocks.of(shape, 4)
    stored, expected = _stored(torch.randn(shape), blocks)
    data = bytearray(stored)
    rows, columns = (0, blocks.num_rows), (0, blocks.num_columns)
    for bit in range(0, 8 * len(data), max(1, 8 * len(data) // 101)):
        data[bit // 8] ^= 1 << bit % 8
        damaged = set()
        for span in blocks.spans(rows, columns, 128 * KIB):
            memory = memoryview(data)[span.first_byte : span.first_byte + span.num_bytes]
            block = blocks.damaged(span, memory, expected)
            if block is not None:
                damaged.add(block)
                assert span.first_byte <= bit // 8 < span.first_byte + span.num_bytes
        assert len(damaged) == 1
        data[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize("saved", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("loaded", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_shard_of_another_layout_needs_few_more_bytes(saved: int, loaded: int, dim: int) -> None:
    """At most 1.1 times the shard; if both numbers of ranks are powers of two, exactly the shard."""
    shape = [4608, 4608]
    size = shape[dim]
    for rank in range(loaded):
        wanted = (size * rank // loaded, size * (rank + 1) // loaded)
        num_bytes = 0
        for chunk_rank in range(saved):
            chunk = (size * chunk_rank // saved, size * (chunk_rank + 1) // saved)
            common = (max(wanted[0], chunk[0]) - chunk[0], min(wanted[1], chunk[1]) - chunk[0])
            if common[0] >= common[1]:
                continue
            blocks = Blocks.of((*shape[:dim], chunk[1] - chunk[0], *shape[dim + 1 :]), 4)
            region = [(0, blocks.num_rows), (0, blocks.num_columns)]
            region[dim] = common
            num_bytes += sum(span.num_bytes for span in blocks.spans(region[0], region[1], 4096 * KIB))
        shard = (wanted[1] - wanted[0]) * shape[1 - dim] * 4
        bound = 1.0 if 3 not in (saved, loaded) else 1.1
        assert shard <= num_bytes <= bound * shard, (rank, num_bytes / shard)


def test_checksum_is_that_of_xxh3() -> None:
    assert checksum(b"") == 0x2D06800538D394C2  # the specification's value for no bytes
