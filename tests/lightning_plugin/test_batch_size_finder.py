"""BatchSizeFinder: the largest batch that fits, by dry runs; two steps confirm it, and a resumed run keeps it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning_plugin.scripts.plugin_models import set_torchrun_environment, trainer
from lightning_plugin.test_dry_run import TOKENS, LitText
from torch.utils.data import DataLoader

import weft
from support.ranks import on_ranks
from weft.lightning import BatchSizeFinder, WeftModelParallelStrategy
from weft.strategy.dry_run import Request
from weft.strategy.dry_run.entry import estimate_all

START, LARGEST, SAMPLES = 2, 5, 40
# What the Trainer holds beside what a dry run plays.
MARGIN = 1.02


class Text(LitText):
    """Reads its batch size when the loader is made."""

    def __init__(self, batch_size: int = START) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.sizes: list[int] = []

    def train_dataloader(self) -> DataLoader:
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(256, (SAMPLES, TOKENS + 1), generator=generator)
        return DataLoader(tokens, batch_size=self.hparams["batch_size"])

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.sizes.append(len(batch))
        return super().training_step(batch, batch_idx)


class Data(pl.LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.rows = START

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.zeros(SAMPLES, TOKENS + 1, dtype=torch.int64), batch_size=self.rows)


def _fit(
    world_size: int, tmp_path: Path, finder: Any, module: Any, data: Any = None, ckpt_path: Any = None, **options: Any
) -> pl.Trainer:
    strategy = WeftModelParallelStrategy(plan="auto", **{"layout": "dp2", **options})
    run = trainer(world_size, strategy, tmp_path, precision="32-true", max_epochs=-1, max_steps=3, callbacks=[finder])
    run.fit(module, data, ckpt_path=ckpt_path)
    return run


STAGES = {"pipeline_cuts": ["layers.1"], "num_micro_batches": 2}


@pytest.fixture(scope="module")
def peaks() -> tuple[int, int, int]:
    """Return the peaks of two data-parallel ranks with the largest batch and with the next, and of two stages."""
    cases: list[tuple[int, str, dict[str, Any]]] = [(LARGEST, "dp2", {}), (LARGEST + 1, "dp2", {}), (6, "pp2", STAGES)]
    first, second, third = estimate_all(
        [Request(Text, layout, num_rows=num_rows, **options) for num_rows, layout, options in cases]
    )
    return first.peak_bytes, second.peak_bytes, third.peak_bytes


@on_ranks(2, timeout=400)
def test_largest_batch_trains_and_a_resumed_run_keeps_it(
    world_size: int, rank: int, tmp_path: Path, peaks: tuple[int, int, int]
) -> None:
    set_torchrun_environment(rank, world_size)
    limit = int(MARGIN * peaks[0])
    assert limit < peaks[1]
    finder, module = BatchSizeFinder(memory_limit=limit), Text()
    weft.memory.track()
    weft.memory.reset_peak()
    run = _fit(world_size, tmp_path, finder, module)
    assert finder.batch_size == LARGEST == module.hparams["batch_size"] and module.sizes == [LARGEST] * 3
    assert finder.predicted_bytes == peaks[0]
    assert finder.measured_bytes is not None and 0.9 * peaks[0] < finder.measured_bytes <= limit
    run.save_checkpoint(tmp_path / "three.ckpt")
    other, resumed = BatchSizeFinder(max_batch_size=1), Text()
    run = _fit(world_size, tmp_path, other, resumed, ckpt_path=tmp_path / "three.ckpt")
    assert other.batch_size == LARGEST == resumed.hparams["batch_size"] and other.predicted_bytes == 0


@on_ranks(2, timeout=400)
def test_errors_are_the_same_on_all_ranks(world_size: int, rank: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    with pytest.raises(ValueError, match=r"no batch fits into 0\.001 GB, and the smallest takes 0\.0\d+ GB; pass"):
        _fit(world_size, tmp_path, BatchSizeFinder("1MB"), Text())
    with pytest.raises(ValueError, match="found no attribute 'rows' in the LightningModule"):
        _fit(world_size, tmp_path, BatchSizeFinder(batch_arg_name="rows"), Text())
    with pytest.raises(ValueError, match="got loaders that were passed to fit"):
        _fit(world_size, tmp_path, BatchSizeFinder(), Text(), Data().train_dataloader())
    with pytest.raises(ValueError, match="got offload, which no dry run has; set the batch size yourself"):
        _fit(world_size, tmp_path, BatchSizeFinder(), Text(), offload={"optimizer": "cpu"})
    finder, data = BatchSizeFinder(batch_arg_name="rows", max_batch_size=3), Data()
    finder.batch_size, finder._limit = 3, 1  # as if fewer bytes had been predicted than a step takes
    with pytest.raises(RuntimeError, match=r"rows=3 takes 0.0.* GB in 2 steps, .* and the limit is 1e-09 GB; pass"):
        _fit(world_size, tmp_path, finder, Text(), data)
    assert data.rows == 3


@on_ranks(2, timeout=400)
def test_stages_are_predicted(world_size: int, rank: int, tmp_path: Path, peaks: tuple[int, int, int]) -> None:
    set_torchrun_environment(rank, world_size)
    finder = BatchSizeFinder(max_batch_size=6)
    _fit(world_size, tmp_path, finder, Text(), layout="pp2", **STAGES)
    assert (finder.batch_size, finder.predicted_bytes) == (6, peaks[2])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_batch_size": 0}, "max_batch_size=0; pass a number from 1"),
        ({"memory_limit": "much"}, "memory_limit='much': .*give a number of bytes"),
    ],
)
def test_invalid_arguments_raise_errors(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BatchSizeFinder(**arguments)


def test_other_strategies_raise_errors(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="got a Trainer with a SingleDeviceStrategy; pass strategy='weft'"):
        trainer(1, "auto", tmp_path, callbacks=[BatchSizeFinder()]).fit(Text())
