"""Reads regions of a chunk into tensors of any strides and dtype."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from weft.strategy.checkpoint.blocks import Blocks
from weft.strategy.checkpoint.local import LocalInputFiles, LocalLocation
from weft.strategy.checkpoint.manifest import Manifest
from weft.strategy.checkpoint.reading import ChunkReader
from weft.strategy.checkpoint.writing import write_chunks

SHAPES = [(), (5,), (40_000,), (3, 5), (1, 1 << 16), (300, 512), (96, 30, 40), (2, 3, 1 << 14), (64, 96, 4, 9)]


@pytest.mark.parametrize("max_bytes", [1, 64 << 10, 4 << 20])
def test_regions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_bytes: int) -> None:
    monkeypatch.setattr(LocalInputFiles, "max_bytes", max_bytes)
    values = {str(shape): torch.randn(shape, dtype=torch.float64).to(torch.float32) for shape in SHAPES}
    wanted = [(name, Blocks.of(tuple(value.shape), value.itemsize), value.dtype) for name, value in values.items()]
    assert {blocks.num_panels for _, blocks, _ in wanted} > {1} and max(b.num_panels for _, b, _ in wanted) > 4
    file, chunks = write_chunks(LocalLocation(tmp_path), "rank-00000.safetensors", wanted, values.values())
    reader = ChunkReader(LocalLocation(tmp_path), Manifest({}, {"rank-00000.safetensors": file}, {}), lambda _: None)
    choose = random.Random(0)
    for (name, value), chunk in zip(values.items(), chunks, strict=True):
        for _ in range(25):
            starts = [choose.randrange(size) for size in value.shape]
            ends = [choose.randrange(start, size) + 1 for start, size in zip(starts, value.shape, strict=True)]
            if choose.random() < 0.3:
                starts, ends = [0] * value.dim(), list(value.shape)
            region = value[tuple(map(slice, starts, ends))]
            dtype = choose.choice([torch.float32, torch.float64])
            around = torch.full([size + 2 for size in region.shape], torch.nan, dtype=dtype)
            target = around[(slice(1, -1),) * value.dim()]
            reader.read(name, value.dtype, chunk, tuple(starts), target)
            assert torch.equal(target, region.to(dtype)), (name, starts, ends)
            assert int(around.isnan().sum()) == around.numel() - region.numel()
    reader.close()
