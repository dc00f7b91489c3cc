"""BatchSizeFinder: the largest batch that fits, by dry runs; two steps confirm it, and a resumed run keeps it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning_plugin.scripts.plugin_models import set_torchrun_environment, trainer
from lightning_plugin.test_dry_run import TOKENS, LitText
from torch.utils.data import DataLoader

import support.warm_starts  # noqa: F401  (for dry runs)
from support.hugging_face import language_model
from support.ranks import on_ranks
from weft._plugin.console import Console
from weft._plugin.largest_batch import _batch_of
from weft.lightning import BatchSizeFinder, WeftModelParallelStrategy
from weft.strategy.dry_run import Request
from weft.strategy.dry_run.entry import estimate_all
from weft.strategy.pipeline import AutoCuts

START, LARGEST, SAMPLES = 2, 5, 40
USED = 0.97  # of the limit
ROW_BYTES = 8 * (TOKENS + 1)  # of the batch that is loaded ahead


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


class Experts(Text):
    """Has a mixture of experts."""

    def configure_model(self) -> None:
        if self.model is None:
            sizes = {"vocab_size": 256, "max_position_embeddings": TOKENS, "num_local_experts": 8}
            self.model = language_model("mixtral", torch.float32, num_hidden_layers=1, **sizes)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.model(batch[:, :-1], labels=batch[:, 1:]).loss


class Data(pl.LightningDataModule):
    """Holds what cannot be sent to another process once it is set up, and shuffles."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = START
        self.num_setups = 0

    def setup(self, stage: str) -> None:
        self.num_setups += 1
        self.handle = lambda: None

    def train_dataloader(self) -> DataLoader:
        ids = torch.zeros(SAMPLES, TOKENS + 1, dtype=torch.int64)
        return DataLoader(ids, batch_size=self.rows, shuffle=True)


class SmallRows(pl.LightningModule):
    """Its batches are large beside its activations, and the data set is in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 4
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.zeros(1 << 14, 64), batch_size=self.batch_size)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layers(batch).square().mean()


def _fit(
    world_size: int, tmp_path: Path, finder: Any, module: Any, data: Any = None, ckpt_path: Any = None, **options: Any
) -> pl.Trainer:
    settings = {"max_epochs": -1, "max_steps": options.pop("max_steps", 3), "callbacks": [finder]}
    strategy = WeftModelParallelStrategy(plan="auto", **{"layout": "dp2", **options})
    run = trainer(world_size, strategy, tmp_path, precision="32-true", **settings)
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
    predicted = peaks[0] + LARGEST * ROW_BYTES
    limit = math.ceil(predicted / USED)
    assert USED * limit < peaks[1] + (LARGEST + 1) * ROW_BYTES
    finder, module = BatchSizeFinder(memory_limit=limit), Text()
    run = _fit(world_size, tmp_path, finder, module)
    assert finder.batch_size == LARGEST == module.hparams["batch_size"] and module.sizes == [LARGEST] * 3
    assert finder.predicted_bytes == predicted == run.strategy.predicted_bytes
    # Staging buffers of earlier tests in this process, which the prediction contains, are used again.
    assert finder.measured_bytes is not None and finder.measured_bytes <= limit
    assert 0.95 * predicted < finder.measured_bytes + finder._earlier_communication
    run.save_checkpoint(tmp_path / "three.ckpt")
    other, resumed = BatchSizeFinder(max_batch_size=1), Text()
    run = _fit(world_size, tmp_path, other, resumed, ckpt_path=tmp_path / "three.ckpt", max_steps=4)
    assert other.batch_size == LARGEST == resumed.hparams["batch_size"] and other.predicted_bytes == 0
    assert resumed.sizes == [LARGEST] and run.strategy.predicted_bytes is None
    # A loader that was made before the checkpoint was read, as by trainer.estimated_stepping_batches.
    other.measured_bytes = None
    other.on_train_batch_start(run, resumed, torch.zeros(LARGEST, 3), 0)
    with pytest.raises(RuntimeError, match=r"batches of 1 rows from a loader .* the checkpoint has batch_size=5; do"):
        other.on_train_batch_start(run, resumed, torch.zeros(1, 3), 0)


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
    with pytest.raises(ValueError, match="got AutoCuts as pipeline_cuts, which no dry run has"):
        _fit(world_size, tmp_path, BatchSizeFinder(), Text(), layout="pp2", pipeline_cuts=AutoCuts())


@on_ranks(2, timeout=400)
def test_data_modules_and_small_rows(
    world_size: int, rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_torchrun_environment(rank, world_size)
    lines: list[str] = []
    monkeypatch.setattr(Console, "warn", lambda self, text: lines.append(text))
    limit = 4_000_000
    finder, module = BatchSizeFinder(limit), SmallRows()
    _fit(world_size, tmp_path, finder, module)
    assert finder.batch_size == module.batch_size > 1000 and finder.predicted_bytes <= USED * limit
    assert finder.measured_bytes is not None and finder.measured_bytes <= limit
    assert 0.9 * finder.predicted_bytes < finder.measured_bytes + finder._earlier_communication
    assert not [line for line in lines if "batch_size" in line]
    finder._limit = 1  # as if fewer bytes had been predicted than a step takes
    _fit(world_size, tmp_path, finder, SmallRows())
    [line] = [line for line in lines if "batch_size" in line]
    assert "and the limit is 1e-09 GB; pass a lower memory_limit to BatchSizeFinder." in line

    finder, data = BatchSizeFinder(batch_arg_name="rows", max_batch_size=3), Data()
    _fit(world_size, tmp_path, finder, Text(), data, max_steps=0)
    assert finder.batch_size == 3 == data.rows and data.num_setups == 1


@on_ranks(2, timeout=400)
def test_stages_are_predicted(world_size: int, rank: int, tmp_path: Path, peaks: tuple[int, int, int]) -> None:
    set_torchrun_environment(rank, world_size)
    finder = BatchSizeFinder(max_batch_size=6)
    _fit(world_size, tmp_path, finder, Text(), layout="pp2", **STAGES)
    assert (finder.batch_size, finder.predicted_bytes) == (6, peaks[2] + 6 * ROW_BYTES)


@on_ranks(2, timeout=400)
def test_sharded_experts_are_predicted(world_size: int, rank: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    finder = BatchSizeFinder(max_batch_size=START)
    _fit(world_size, tmp_path, finder, Experts(), layout="dp2,ep2", zero_stage=0, max_steps=0)
    if rank == 0:
        [expected] = estimate_all([Request(Experts, "dp2,ep2", num_rows=START, zero_stage=0)])
        assert finder.predicted_bytes == expected.peak_bytes + START * ROW_BYTES


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


def test_first_batch_of_a_data_module_draws_no_numbers() -> None:
    data = Data()
    data.setup("fit")
    before = torch.get_rng_state()
    assert _batch_of(data).shape == (START, TOKENS + 1)
    assert torch.equal(torch.get_rng_state(), before)


def test_other_strategies_raise_errors(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="got a Trainer with a SingleDeviceStrategy; pass strategy='weft'"):
        trainer(1, "auto", tmp_path, callbacks=[BatchSizeFinder()]).fit(Text())
