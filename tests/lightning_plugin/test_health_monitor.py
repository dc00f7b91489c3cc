"""HealthMonitor: real ranks, one of which sleeps, and times by a clock that the tests set."""

from __future__ import annotations

import math
import os
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from lightning_plugin.scripts.pipeline_models import Text, pipeline_strategy, text_loader
from lightning_plugin.scripts.plugin_models import Model, fixed_data, loader, set_torchrun_environment, trainer
from torch import Tensor

from support.processes import run_on_forks
from support.ranks import on_ranks
from weft._plugin.step_times import StepTimer, StepTimes, are_comparable, excesses, is_slow
from weft.lightning import HealthMonitor, WeftModelParallelStrategy

SLOW_SECONDS = 0.3  # far more than the work of a step


class Slow(Model):
    """Sleeps in each training step."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        time.sleep(self.seconds)
        return super().training_step(batch, batch_idx)


class SlowData(list[Tensor]):
    """Samples that take SLOW_SECONDS to read."""

    def __getitem__(self, idx: Any) -> Any:
        time.sleep(SLOW_SECONDS / 4)  # a batch has 4 samples
        return super().__getitem__(idx)


def _fit(run: Any, model: Any, data: Any = None) -> list[str]:
    """Fit, and return this rank's warnings of the monitor."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.fit(model, loader() if data is None else data)
    return [text for text in (str(each.message) for each in caught) if text.startswith("weft: in steps")]


@on_ranks(2, 4)
@pytest.mark.parametrize("where", ["step", "loader"])
def test_slow_rank_is_named(rank: int, world_size: int, tmp_path: Path, where: str) -> None:
    """Whichever group of the rank the others wait in."""
    set_torchrun_environment(rank, world_size)
    layouts = {2: ["dp2", "tp2"], 4: ["dp2,tp2"]}[world_size]
    for layout in layouts:
        monitor = HealthMonitor(every_n_steps=3, threshold=2)
        strategy = WeftModelParallelStrategy(plan="auto", layout=layout, zero_stage=0, check_batches=0)
        run = trainer(world_size, strategy, tmp_path, callbacks=[monitor], limit_train_batches=3)
        is_slow_rank = rank == 1
        model = Slow(SLOW_SECONDS if is_slow_rank and where == "step" else 0.0)
        data = loader(SlowData(fixed_data())) if is_slow_rank and where == "loader" else loader()
        texts = _fit(run, model, data)
        assert len(texts) == (rank == 0), texts
        named = "rank 1 spends" if rank == 0 else ""
        assert all(text.startswith(f"weft: in steps 2 to 3, {named}") and text.count("spends") == 1 for text in texts)
        rows = monitor.table()
        part = "compute" if where == "step" else "loader"
        assert [row["rank"] for row in rows] == list(range(world_size))
        assert rows[1][part] >= SLOW_SECONDS and rows[1][part] == max(row[part] for row in rows)
        assert all(row["wait"] > rows[1]["wait"] for row in rows if row["rank"] != 1)
        metrics = {name: value.item() for name, value in run.callback_metrics.items() if name.startswith("health/")}
        assert metrics == {
            "health/step_seconds": max(row["step"] for row in rows),
            "health/loader_seconds_max": max(row["loader"] for row in rows),
            "health/wait_seconds_min": rows[1]["wait"],
            "health/wait_seconds_max": max(row["wait"] for row in rows),
            "health/compute_seconds_max": max(row["compute"] for row in rows),
            "health/slowest_rank": 1,
            "health/num_slow_ranks": 1,
        }


@on_ranks(4)
def test_equal_ranks_are_not_named(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    monitor = HealthMonitor(every_n_steps=3, threshold=3)
    strategy = WeftModelParallelStrategy(plan="auto", layout="dp2,tp2")
    run = trainer(world_size, strategy, tmp_path, callbacks=[monitor], limit_train_batches=3)
    assert not _fit(run, Slow(SLOW_SECONDS / 6))
    assert run.callback_metrics["health/num_slow_ranks"] == 0
    assert all(row["compute"] >= SLOW_SECONDS / 6 for row in monitor.table())


class SlowText(Text):
    """Sleeps in the forward of its own part of the model."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.model.layers[0].register_forward_pre_hook(lambda *_: time.sleep(seconds))
        self.model.layers[2].register_forward_pre_hook(lambda *_: time.sleep(seconds))


@on_ranks(2, 4)
def test_ranks_are_compared_within_a_stage(rank: int, world_size: int, tmp_path: Path) -> None:
    """All ranks of the last stage sleep; on 4 ranks, one more rank does, which is the only one to be named.

    On 2 ranks, each stage has one rank, and no rank is named.
    """
    set_torchrun_environment(rank, world_size)
    monitor = HealthMonitor(every_n_steps=2, threshold=1.5)
    layout = "pp2" if world_size == 2 else "pp2,dp2"
    run = trainer(
        world_size, pipeline_strategy(layout, zero_stage=0), tmp_path, callbacks=[monitor], limit_train_batches=2
    )
    is_last_stage = rank >= world_size // 2
    seconds = SLOW_SECONDS / 2 if is_last_stage or (world_size == 4 and rank == 1) else 0.0
    num_ranks = world_size // 2
    texts = _fit(run, SlowText(seconds), text_loader(rank=rank % num_ranks, num_ranks=num_ranks))
    rows = monitor.table()
    assert [row["stage"] for row in rows] == [each // num_ranks for each in range(world_size)]
    logged = {name for name in run.callback_metrics if name.startswith("health/")}
    assert ("health/slowest_rank" in logged) == ("health/num_slow_ranks" in logged) == (world_size == 4)
    assert {"health/loader_seconds_max", "health/wait_seconds_min", "health/compute_seconds_max"} <= logged
    if rank != 0 or world_size == 2:
        assert not texts
    else:
        assert len(texts) == 1 and texts[0].startswith("weft: in steps 2 to 2, rank 1 spends")
        assert texts[0].count("spends") == 1 and "the ranks of its pipeline stage" in texts[0]


def _fit_on_gloo(rank: int, folder: Path) -> None:
    set_torchrun_environment(rank, 2)
    os.environ["RANK"] = str(rank)
    monitor = HealthMonitor(every_n_steps=3, threshold=2)
    strategy = WeftModelParallelStrategy(plan="auto", layout="tp2", process_group_backend="gloo", check_batches=0)
    run = trainer(2, strategy, folder, callbacks=[monitor], limit_train_batches=3)
    slow = rank == 1
    assert not _fit(run, Slow(SLOW_SECONDS if slow else 0.0), loader(SlowData(fixed_data())) if slow else loader())
    assert all(set(row) == {"rank", "stage", "step"} and row["step"] >= SLOW_SECONDS for row in monitor.table())
    assert {name for name in run.callback_metrics if name.startswith("health/")} == {"health/step_seconds"}


def test_other_backends_are_not_compared(tmp_path: Path) -> None:
    """Waits of gloo are not measured: a rank that loads and computes slowly is not named."""
    assert run_on_forks(2, _fit_on_gloo, tmp_path) == [0, 0]


@on_ranks(2)
def test_one_collective_every_n_steps(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    counts = []
    for callbacks in ([], [HealthMonitor(every_n_steps=2)]):
        run = trainer(world_size, "weft_tp", tmp_path, callbacks=callbacks, max_epochs=2)
        counts.append(-_num_collectives())
        run.fit(Model(), loader())
        counts[-1] += _num_collectives()
    assert counts[1] - counts[0] == 12 // 2, counts


def _num_collectives() -> int:
    world = dist.group.WORLD
    return world._get_sequence_number_for_group() if world is not None else 0


class Clocked(Model):
    """Sets the monitor's clocks: a step takes 1 s and waits for 0.25 s of it, a validation takes far longer."""

    def __init__(self, monitor: Any) -> None:
        super().__init__()
        self.now = self.waited = 1000.0
        monitor._clock = lambda: self.now
        monitor._seconds_waited = lambda: self.waited

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.now += 0.5 if batch_idx else 0.0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.now += 1
        self.waited += 0.25
        return super().training_step(batch, batch_idx)

    def on_validation_epoch_start(self) -> None:
        self.now += 1e6
        self.waited += 1e6


@on_ranks(2)
@pytest.mark.parametrize("accumulated", [1, 3])
def test_parts_of_a_step(rank: int, world_size: int, tmp_path: Path, accumulated: int) -> None:
    set_torchrun_environment(rank, world_size)
    monitor = HealthMonitor(every_n_steps=2)
    with pytest.raises(RuntimeError, match=r"HealthMonitor has no times yet; call table\(\) after a run of"):
        monitor.table()
    options: dict[str, Any] = {"accumulate_grad_batches": accumulated, "val_check_interval": 2, "max_epochs": 2}
    run = trainer(world_size, "weft_tp", tmp_path, callbacks=[monitor], **options)
    run.fit(Clocked(monitor), loader(), loader(fixed_data()[:4]))
    # The last window of 2 steps: batches 5 and 6, or all 6. The hook of the module comes after that of the callback.
    starts = 2 if accumulated == 1 else 5
    step = (starts * 0.5 + 2 * accumulated) / 2
    waited = 0.25 * accumulated
    expected = {"stage": 0, "step": step, "loader": 0, "wait": waited, "compute": step - waited}
    assert monitor.table() == [{"rank": each} | expected for each in range(world_size)]


class SlowInTurn(Clocked):
    """Steps of a rank take 9 s more if its entry for the batch is true."""

    def __init__(self, monitor: Any, is_slow: list[bool]) -> None:
        super().__init__(monitor)
        self.is_slow = is_slow

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.now += 9 if self.is_slow[batch_idx] else 0
        return super().training_step(batch, batch_idx)


@on_ranks(2)
def test_warns_again_when_other_ranks_are_slow(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    slow_ranks = [None, 1, 1, 0, None, 0]
    monitor = HealthMonitor(every_n_steps=1)
    run = trainer(world_size, "weft_tp", tmp_path, callbacks=[monitor])
    texts = _fit(run, SlowInTurn(monitor, [each == rank for each in slow_ranks]))
    named = [text.split(" spends")[0] for text in texts]
    numbered = [(2, 1), (4, 0), (6, 0)] if rank == 0 else []
    assert named == [f"weft: in steps {step} to {step}, rank {each}" for step, each in numbered]


def _rows(*parts: tuple[int, float, float], step: float = 1.0) -> list[StepTimes]:
    """Return rows of (stage, loading, waiting)."""
    return [StepTimes(rank, stage, step, loading, waiting) for rank, (stage, loading, waiting) in enumerate(parts)]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (_rows((0, 0, 0.1), (0, 0, 0.75)), [0.65, 0]),
        (_rows((0, 0.5, 0.1), (0, 0.5, 0.2), (0, 0.1, 0.2), (0, 0.9, 0.3)), [0.1, 0, 0, -0.1]),
        (_rows((0, 0, 0.1), (0, 0, 0.1), (1, 0, 0.9), (1, 0, 0.6)), [0, 0, 0, 0.3]),
    ],
    ids=["two", "median", "stages"],
)
def test_excess_over_the_median_of_a_stage(rows: list[StepTimes], expected: list[float]) -> None:
    assert are_comparable(rows)
    assert excesses(rows) == pytest.approx(expected)


@pytest.mark.parametrize(
    "rows",
    [_rows((0, 0, 0.1)), _rows((0, 0, 0.1), (1, 0, 0.6)), _rows((0, 0.2, math.nan), (0, 0.5, math.nan))],
    ids=["one", "single stages", "not measured"],
)
def test_ranks_that_are_not_comparable(rows: list[StepTimes]) -> None:
    assert not are_comparable(rows)


def test_slow_is_by_the_gain_in_speed() -> None:
    [row] = _rows((0, 0, 0.1), step=1.2)
    assert is_slow(row, 0.21, 1.2) and not is_slow(row, 0.19, 1.2)
    assert is_slow(row, 0.6 + 1e-9, 2.0) and not is_slow(row, 0.0, 1.2) and not is_slow(row, -1.0, 1.2)


def test_timer_adds_up_parts() -> None:
    now, waited = [10.0], [5.0]
    timer = StepTimer(lambda: now[0], lambda: waited[0])

    def pass_time(seconds: float, waiting: float) -> None:
        now[0] += seconds
        waited[0] += waiting

    for _ in range(2):
        pass_time(3, 1)
        timer.pause()
        pass_time(100, 50)
        timer.resume()
        pass_time(1, 0)
        timer.batch_begins()
        pass_time(6, 2)
        timer.batch_ends()
    assert timer.means(2) == (10, 3, 3)
    timer.restart()
    pass_time(4, 0)
    timer.batch_ends()
    assert timer.means(1) == (4, 0, 0)


@on_ranks(2)
def test_other_strategies_raise(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    run = trainer(world_size, DDPStrategy(), tmp_path, callbacks=[HealthMonitor()])
    with pytest.raises(TypeError, match="HealthMonitor got a Trainer with a DDPStrategy; pass strategy='weft'"):
        run.fit(Model(), loader())


@pytest.mark.parametrize("threshold", [1, 0.5, True, "2", math.inf, math.nan])
def test_wrong_arguments_raise(threshold: Any) -> None:
    with pytest.raises(ValueError, match="HealthMonitor got every_n_steps=0; pass a number of steps from 1 on"):
        HealthMonitor(every_n_steps=0)
    with pytest.raises(ValueError, match=r"HealthMonitor got threshold=.*; pass a ratio above 1, such as 1.2"):
        HealthMonitor(threshold=threshold)
