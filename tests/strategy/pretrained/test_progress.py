"""ReadProgress counts the bytes that a rank reads, and estimates their sum while it reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import weft
from support import pretrained
from support.parity import tensor_parallel
from support.ranks import on_ranks
from weft.strategy import deferred_init
from weft.strategy.deferred.files import FileTensor
from weft.strategy.pretrained.progress import ReadProgress


class _Shown:
    """Records what a ReadProgress shows."""

    def __init__(self) -> None:
        self.figures: list[tuple[int, int]] = []
        self.progress = ReadProgress(lambda *figures: self.figures.append(figures))

    def check(self, num_read: int, share: float, full: int) -> None:
        """Check that the figures end at `num_read`, and begin at most 10 % from it once a layer's tensors are read."""
        assert self.figures[-1] == (num_read, num_read)
        assert [read for read, _ in self.figures] == sorted(read for read, _ in self.figures)
        assert all(read <= to_read <= full for read, to_read in self.figures)
        for read, to_read in self.figures:
            if read > share * full / 2:
                assert abs(to_read - num_read) <= 0.1 * num_read


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pretrained.save("llama", tmp_path_factory.mktemp("pretrained"))


@on_ranks(1, 2)
def test_shards_are_counted(world_size: int, path: Path) -> None:
    with deferred_init(min_bytes=256):
        model = pretrained.load(path)
    full = sum(p.nbytes for p in model.parameters())
    shown = _Shown()
    shown.progress.expect_module(model)
    shown.progress.expect_module(model)  # the second call adds nothing
    assert shown.progress.num_to_read == full
    before = FileTensor.num_bytes_read
    with shown.progress.follow():
        weft.parallelize(model, tensor_parallel(world_size), "auto")
    num_read = FileTensor.num_bytes_read - before
    assert num_read == full if world_size == 1 else num_read < 0.6 * full
    shown.check(num_read, 1 / world_size, full)
    num_figures = len(shown.figures)
    with deferred_init(min_bytes=256):
        other = pretrained.load(path)
    weft.parallelize(other, tensor_parallel(world_size), "auto")
    assert len(shown.figures) == num_figures  # outside of `follow`


def test_weights_that_are_read_at_once_are_expected(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(8, 4), "bias": torch.ones(8)}, tmp_path / "weights.pt")
    shown = _Shown()
    with shown.progress.follow():
        weft.load_pretrained(nn.Linear(4, 8), tmp_path / "weights.pt")
    assert shown.figures == [(128, 160), (160, 160)]


def test_tensors_that_were_not_expected_count_when_they_are_read() -> None:
    shown = _Shown()
    tensors = [FileTensor((4,), torch.float32, torch.zeros(4).__getitem__) for _ in range(2)]
    shown.progress.expect(tensors[:1])
    with shown.progress.follow():
        tensors[1].read(((0, 2),))
        tensors[1].read(((2, 4),))
        tensors[0].read(((0, 1),))
    assert shown.figures == [(8, 16), (16, 32), (20, 20)]
