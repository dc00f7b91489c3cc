"""The mixin of HealthMonitor, a callback that finds slow ranks and records hangs; `factory.py` adds the base class."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from weft import collectives
from weft._plugin.console import Console
from weft._plugin.flight_watch import FlightWatch
from weft._plugin.meshes import PIPELINE_AXIS
from weft._plugin.monitors import check_at_least_one, log, num_steps
from weft._plugin.step_times import StepTimer, StepTimes, are_comparable, excesses, is_slow
from weft._plugin.strategy_mixin import StrategyMixin


class HealthMixin:
    """Logs the time of a step, split into computing, loading and waiting for other ranks; warns of slow ranks.

    Every `every_n_steps` optimizer steps, all ranks exchange four numbers and log, in seconds per step, as means over
    the steps since the last exchange, without validation:

    - "health/step_seconds": the maximum over the ranks,
    - "health/loader_seconds_max": between two batches: the loader, and callbacks such as ModelCheckpoint,
    - "health/wait_seconds_min" and "health/wait_seconds_max": blocked in communication of the backend `weft`,
    - "health/compute_seconds_max": the rest,
    - "health/slowest_rank": the global rank whose loading and computing exceed the median of the ranks of its pipeline
      stage most; and "health/num_slow_ranks". Neither is logged if each stage has one rank.

    If steps would be `threshold` times as fast without the excess of a rank, global rank 0 warns, and names the rank;
    it warns again when other ranks are slow.

    On CUDA, and with other backends such as gloo, waiting is not measured: only "health/step_seconds" is logged, and no
    rank is named.

    If a group of the backend `weft` fails, for example because a rank does not answer within the timeout, each rank
    that runs writes its newest 512 calls and its Python stacks to a file in `record_dir`: see `weft.flight`.

    Args:
        every_n_steps: the optimizer steps between two exchanges. The first step of a run is not measured.
        threshold: above 1.
        record_dir: the directory for flight records, which all ranks can write to; None: no records. Records of an
            earlier run are moved to its folder `previous`.
    """

    _clock = staticmethod(time.perf_counter)
    _seconds_waited = staticmethod(collectives.seconds_waited)

    def __init__(
        self, every_n_steps: int = 50, threshold: float = 1.2, record_dir: str | os.PathLike[str] | None = None
    ) -> None:
        super().__init__()
        check_at_least_one("HealthMonitor", "every_n_steps", every_n_steps)
        if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not 1 < threshold < math.inf:
            raise ValueError(f"HealthMonitor got threshold={threshold!r}; pass a ratio above 1, such as 1.2.")
        self._every_n_steps = every_n_steps
        self._threshold = threshold
        self._record_dir = None if record_dir is None else Path(record_dir)
        self._watch: FlightWatch | None = None
        self._timer: StepTimer | None = None  # None: before the end of the first step
        self._step = self._first_step = 0
        self._rows: list[StepTimes] = []
        self._named: list[int] = []  # the ranks in the last warning, unless none has been slow since

    def table(self) -> list[dict[str, float]]:
        """Return a row for each rank, as of the last exchange, the same on all ranks.

        Each row has "rank", "stage", and in seconds per step "step" and, where waiting is measured, "loader", "wait"
        and "compute".

        Raises:
            RuntimeError: the ranks have not exchanged times yet.
        """
        if not self._rows:
            raise RuntimeError(
                f"HealthMonitor has no times yet; call table() after a run of more than {self._every_n_steps} steps."
            )
        table = []
        for row in self._rows:
            parts = {"loader": row.loading, "wait": row.waiting, "compute": row.computing} if row.has_parts else {}
            table.append({"rank": row.rank, "stage": row.stage, "step": row.step} | parts)
        return table

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self._record_dir is not None and self._watch is None:
            self._watch = FlightWatch(self._record_dir, trainer.global_rank, trainer.world_size)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if self._watch is not None:
            self._watch.record(exception)
        self.teardown(trainer, pl_module, "")

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self._watch is not None:
            self._watch.stop()
        self._watch = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if not isinstance(trainer.strategy, StrategyMixin):
            name = type(trainer.strategy).__name__
            raise TypeError(f"HealthMonitor got a Trainer with a {name}; pass strategy='weft'.")
        self._timer = None
        self._named = []
        self._step = num_steps(trainer, pl_module)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._timer is not None:
            self._timer.batch_begins()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """After the first step, begin measuring; every `every_n_steps`, exchange the times."""
        if self._timer is not None:
            self._timer.batch_ends()
        before, self._step = self._step, num_steps(trainer, pl_module)
        if self._step == before:
            return
        if self._timer is None:
            self._timer = StepTimer(self._clock, self._seconds_waited)
        elif self._step % self._every_n_steps == 0:
            self._check(trainer, self._timer)
        else:
            return
        self._first_step = self._step
        self._timer.restart()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if self._timer is not None:
            self._timer.pause()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if self._timer is not None:
            self._timer.resume()

    def _check(self, trainer: Any, timer: StepTimer) -> None:
        self._rows = rows = _gather(timer.means(self._step - self._first_step), trainer.strategy)
        metrics: dict[str, float] = {"health/step_seconds": max(row.step for row in rows)}
        if rows[0].has_parts:
            metrics |= {
                "health/loader_seconds_max": max(row.loading for row in rows),
                "health/wait_seconds_min": min(row.waiting for row in rows),
                "health/wait_seconds_max": max(row.waiting for row in rows),
                "health/compute_seconds_max": max(row.computing for row in rows),
            }
        slow = []
        if are_comparable(rows):
            excess = excesses(rows)
            slow = [row for row, each in zip(rows, excess, strict=True) if is_slow(row, each, self._threshold)]
            metrics |= {"health/slowest_rank": excess.index(max(excess)), "health/num_slow_ranks": len(slow)}
        log(trainer, metrics, self._step)
        known, self._named = self._named, [row.rank for row in slow]
        if slow and self._named != known:
            Console(trainer.strategy.fabric_module).warn(self._warning(rows, slow))

    def _warning(self, rows: list[StepTimes], slow: list[StepTimes]) -> str:
        text = f"weft: in steps {self._first_step + 1} to {self._step}, " + "; ".join(_describe(row) for row in slow)
        within = "of its pipeline stage " if len({row.stage for row in rows}) > 1 else ""
        return f"{text}; the median of the ranks {within}is lower, and other ranks wait."


def _describe(row: StepTimes) -> str:
    """Return "rank 1 spends 62.0 ms computing and 0.1 ms between batches of 63.0 ms per step"."""
    parts = f"{1e3 * row.computing:.1f} ms computing and {1e3 * row.loading:.1f} ms between batches"
    return f"rank {row.rank} spends {parts} of {1e3 * row.step:.1f} ms per step"


def _gather(means: tuple[float, float, float], strategy: Any) -> list[StepTimes]:
    """Return each rank's row, by global rank; collective over the default group."""
    step, loading, waiting = means
    mesh = strategy.device_mesh
    stage = mesh.get_local_rank(PIPELINE_AXIS) if PIPELINE_AXIS in (mesh.mesh_dim_names or ()) else 0
    if not measures_waiting(strategy.root_device):
        waiting = math.nan
    local = torch.tensor([stage, step, loading, waiting], dtype=torch.float64, device=strategy.root_device)
    gathered = [local]
    if dist.get_world_size() > 1:
        gathered = [torch.empty_like(local) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, local)
    rows = [values.tolist() for values in gathered]
    return [StepTimes(rank, int(each[0]), *each[1:]) for rank, each in enumerate(rows)]


def measures_waiting(device: torch.device) -> bool:
    """Return whether the time that ranks wait in communication is measured: on CPUs with the backend `weft`."""
    return device.type == "cpu" and "cpu:weft" in dist.get_backend_config().split(",")
