"""Divides the bytes of a chunk into blocks, each with a checksum, so that a rank reads and checks only its shard.

A chunk is the part of a tensor that one rank writes. A rank of another layout needs some of its rows, if weights are
sharded along the first dim, or some of its columns, if they are sharded along the second. A checksum can be compared
only if all bytes are read that it covers. So the file has a chunk as panels, groups of columns one after another, and
a block is some rows of a panel: its bytes are contiguous, and rows and columns can both be read without the others.

    chunk of 6 rows and 4 columns, 2 panels, 3 rows in a block      order of the blocks in the file

        a a b b                                                      a  c  b  d
        a a b b
        a a b b
        c c d d
        c c d d
        c c d d

The checksums need 0.05 % of the bytes of the tensor: a block has at least 16 KiB, or a little less where numbers of
blocks are rounded, and a chunk at most about 4096 blocks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ALGORITHM = "xxh3_64"
CHECKSUM_BYTES = 8
_MIN_BLOCK_BYTES = 16 << 10
_MAX_BLOCKS = 4096
_PART_BYTES = 1 << 20  # about the bytes that are checked and written at a time
_MIN_ROW_BYTES = 256  # of a panel: shorter rows are slow to copy


def checksum(data: bytes | bytearray | memoryview) -> int:
    """Return the checksum of bytes: 64 bits that change if any bit of them does, but for one case in 2**64.

    It finds damage by chance, not by intent.
    """
    return _checksum_function()(data)


@functools.cache
def _checksum_function() -> Callable[[bytes | bytearray | memoryview], int]:
    """Return the function behind `checksum`, for loops over blocks: one of 16 KiB takes less than a microsecond."""
    try:
        from xxhash import xxh3_64_intdigest
    except ImportError:
        raise ImportError("weft needs the package xxhash for checkpoints; `pip install xxhash`.") from None
    return xxh3_64_intdigest


@dataclass(frozen=True)
class Span:
    """Blocks of one panel that are read together.

    Attributes:
        first_byte, num_bytes: in the chunk.
        first_block: the index of the first block's checksum.
        rows, columns: the first index and the end (exclusive) in the chunk.
    """

    first_byte: int
    num_bytes: int
    first_block: int
    rows: tuple[int, int]
    columns: tuple[int, int]


@dataclass(frozen=True)
class Blocks:
    """The blocks of a chunk.

    Attributes:
        shape: of the chunk.
        itemsize: bytes of an element.
        num_panels: groups of columns; it divides the columns.
        block_rows: rows of a block; the last block of a panel may have fewer.
    """

    shape: tuple[int, ...]
    itemsize: int
    num_panels: int
    block_rows: int

    @classmethod
    def of(cls, shape: tuple[int, ...], itemsize: int) -> Blocks:
        """Return the blocks with which a chunk is written."""
        num_bytes = math.prod(shape) * itemsize
        num_blocks = min(max(num_bytes // _MIN_BLOCK_BYTES, 1), _MAX_BLOCKS)
        rows = shape[0] if shape else 1
        columns = shape[1] if len(shape) > 1 else 1
        num_panels = 1
        if num_blocks > 1 and columns > 1:
            wanted = max(math.isqrt(num_blocks), num_blocks // rows)
            wanted = min(wanted, max(num_bytes // rows // _MIN_ROW_BYTES, 1))
            num_panels = next(count for count in range(min(wanted, columns), 0, -1) if columns % count == 0)
        # A power of two, so that the halves, quarters, ... of the rows are whole blocks if the rows divide.
        blocks_per_panel = 1 << (num_blocks // num_panels - 1).bit_length() if num_blocks > num_panels else 1
        return cls(shape, itemsize, num_panels, max(-(-rows // blocks_per_panel), 1))

    @property
    def num_rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def num_columns(self) -> int:
        return self.shape[1] if len(self.shape) > 1 else 1

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    @property
    def panel_columns(self) -> int:
        return self.num_columns // self.num_panels

    @property
    def row_bytes(self) -> int:
        """The bytes of a row of a panel."""
        return self.panel_columns * math.prod(self.shape[2:]) * self.itemsize

    @property
    def blocks_per_panel(self) -> int:
        return -(-self.num_rows // self.block_rows)

    @property
    def num_blocks(self) -> int:
        return self.num_panels * self.blocks_per_panel if self.num_bytes > 0 else 0

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape in the file: that of the chunk, or with several panels [panels, rows, columns of a panel, ...]."""
        if self.num_panels == 1:
            return self.shape
        return (self.num_panels, self.num_rows, self.panel_columns, *self.shape[2:])

    def parts(self, values: Tensor) -> Iterator[tuple[memoryview, list[int]]]:
        """Yield the bytes of a chunk in the order of the file, some blocks at a time, and these blocks' checksums.

        The bytes are valid until the next ones are taken. They are few, so that they stay in a cache until they are
        written.
        """
        if self.num_bytes == 0:
            return
        values = values.detach().resolve_conj().resolve_neg().cpu()
        block_bytes = self.block_rows * self.row_bytes
        panel_bytes = self.num_rows * self.row_bytes
        if self.num_panels == 1:
            data = bytes_of(values.contiguous())
            step = block_bytes * max(_PART_BYTES // block_bytes, 1)
            for first in range(0, self.num_bytes, step):
                yield self._with_checksums(data[first : first + step], step)
            return
        panels = values.reshape(self.num_rows, self.num_panels, self.panel_columns, *self.shape[2:]).transpose(0, 1)
        num_panels = max(_PART_BYTES // panel_bytes, 1)  # at a time
        num_rows = self.num_rows if panel_bytes <= _PART_BYTES else self.block_rows * max(_PART_BYTES // block_bytes, 1)
        buffer = torch.empty((num_panels, num_rows, *panels.shape[2:]), dtype=values.dtype)
        for panel in range(0, self.num_panels, num_panels):
            for row in range(0, self.num_rows, num_rows):
                source = panels[panel : panel + num_panels, row : row + num_rows]
                part = buffer[: source.shape[0], : source.shape[1]]
                part.copy_(source)
                yield self._with_checksums(bytes_of(part), source.shape[1] * self.row_bytes)

    def _with_checksums(self, data: memoryview, panel_bytes: int) -> tuple[memoryview, list[int]]:
        """Return bytes and the checksums of the blocks in them; `panel_bytes`: of each panel in the bytes."""
        block_bytes = self.block_rows * self.row_bytes
        checksums = []
        function = _checksum_function()
        for start in range(0, data.nbytes, panel_bytes):
            panel = data[start : start + panel_bytes]
            checksums += [function(panel[b : b + block_bytes]) for b in range(0, panel.nbytes, block_bytes)]
        return data, checksums

    def spans(self, rows: tuple[int, int], columns: tuple[int, int], max_bytes: int) -> Iterator[Span]:
        """Yield the blocks that have elements of a region, in the order of the file.

        Args:
            rows, columns: the first index and the end (exclusive) of the region, which has elements, in the chunk.
            max_bytes: of a span, unless a block is larger.
        """
        for band in self.bands(rows, columns, max_bytes, max_bytes):
            yield from band

    def bands(
        self, rows: tuple[int, int], columns: tuple[int, int], max_bytes: int, min_read_bytes: int
    ) -> Iterator[list[Span]]:
        """Yield the blocks that have elements of a region, as spans of the same rows in consecutive panels.

        A tensor is written faster by the rows of many panels than by all rows of one panel after another: the rows of
        a panel are on as many pages as there are rows, more than the processor keeps translations of.

        Args:
            rows, columns: as of `spans`.
            max_bytes: of a band, unless a block is larger.
            min_read_bytes: of a span, if the rows are enough: fewer bytes are slow to read.
        """
        first_block = rows[0] // self.block_rows
        end_block = -(-rows[1] // self.block_rows)
        width = self.panel_columns
        first_panel, end_panel = columns[0] // width, -(-columns[1] // width)
        block_bytes = max(self.block_rows * self.row_bytes, 1)
        span_bytes = min(max(max_bytes // (end_panel - first_panel), min_read_bytes), max_bytes)
        step = max(span_bytes // block_bytes, 1)
        num_panels = max(max_bytes // (step * block_bytes), 1)  # of a band
        for panel in range(first_panel, end_panel, num_panels):
            for block in range(first_block, end_block, step):
                first_row = block * self.block_rows
                end_row = min(min(block + step, end_block) * self.block_rows, self.num_rows)
                yield [
                    Span(
                        (each * self.num_rows + first_row) * self.row_bytes,
                        (end_row - first_row) * self.row_bytes,
                        each * self.blocks_per_panel + block,
                        (first_row, end_row),
                        (each * width, (each + 1) * width),
                    )
                    for each in range(panel, min(panel + num_panels, end_panel))
                ]

    def damaged(self, span: Span, data: memoryview, expected: Sequence[int]) -> int | None:
        """Return the index of the first block of a span whose bytes do not have its checksum; None: all have it.

        `expected`: the checksums of all blocks of the chunk.
        """
        size, function = self.block_rows * self.row_bytes, _checksum_function()
        data = data[: span.num_bytes]
        for block, first in enumerate(range(0, span.num_bytes, size), span.first_block):
            if function(data[first : first + size]) != expected[block]:
                return block
        return None


def table_of(checksums: Sequence[int]) -> Tensor:
    """Return checksums as they are stored: 64-bit integers, whose sign has no meaning."""
    return torch.tensor([each - (1 << 64) if each >> 63 else each for each in checksums], dtype=torch.int64)


def checksums_in(table: bytearray) -> Sequence[int]:
    """Return the checksums of a stored table, as a view of it."""
    return memoryview(table).cast("Q")


def bytes_of(values: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU as bytes."""
    return values.reshape(-1).view(torch.uint8).numpy().data
