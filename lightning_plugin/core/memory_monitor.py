"""The mixin of MemoryMonitor, a callback that logs the memory of training; `factory.py` adds the base class."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft import memory
from weft._plugin.monitors import check_at_least_one, log, num_steps
from weft._plugin.strategy_mixin import StrategyMixin


class MemoryMixin:
    """Logs the peak memory, in bytes, as the maximum over the ranks.

    On CPUs: "memory/total", and one value for each category of `weft.memory`, such as "memory/gradients". On CUDA
    devices: "memory/total", and "memory/allocated" and "memory/reserved" of torch's caching allocator. A peak covers
    the time since counting began (CUDA: since the process started) or since `weft.memory.reset_peak(device)`. Each log
    runs one collective.

    On CPUs, the run starts the counting of `weft.memory` if it has not started. The sizes of parameters and buffers
    that were created before, such as those of a model built in `__init__`, are added to "parameters"; other earlier
    tensors are counted only with WEFT_MEMORY=1.

    Args:
        every_n_steps: the steps between two logs; the end of training is logged, too. None: the end of each epoch is
            logged.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        super().__init__()
        if every_n_steps is not None:
            check_at_least_one("MemoryMonitor", "every_n_steps", every_n_steps)
        self._every_n_steps = every_n_steps
        self._table: list[dict[str, int]] = []
        self._watch: memory.Watch | None = None
        self._uncounted_bytes = 0  # of parameters and buffers created before counting began
        self._step = self._reported_step = -1

    def table(self) -> list[dict[str, int]]:
        """Return a row for each rank: "rank" and the values logged for it, in bytes, without the prefix "memory/".

        The rows are those of the last log, and the same on all ranks.

        Raises:
            RuntimeError: nothing was logged yet.
        """
        if not self._table:
            raise RuntimeError("MemoryMonitor has not logged yet; call table() after an epoch or a run.")
        return [dict(row) for row in self._table]

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if trainer.strategy.root_device.type != "cuda":
            memory.track(known=(*pl_module.parameters(), *pl_module.buffers()))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._step, self._reported_step = num_steps(trainer, pl_module), -1
        if memory.is_tracking():
            self._uncounted_bytes = memory.tag_parameters(pl_module)
            if not isinstance(trainer.strategy, StrategyMixin):  # weft's strategies watch by themselves
                self._watch = memory.watch(pl_module, *trainer.optimizers)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._watch is not None:
            self._watch.forward_begins(batch)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        if self._watch is not None:
            self._watch.backward_begins()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        before, self._step = self._step, num_steps(trainer, pl_module)
        if self._every_n_steps and self._step != before and self._step % self._every_n_steps == 0:
            self._report(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self._every_n_steps is None:
            self._report(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self._step != self._reported_step:
            self._report(trainer)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self._watch is not None:
            self._watch.remove()
        self._watch = None

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")

    def _report(self, trainer: Any) -> None:
        self._reported_step = self._step
        device = trainer.strategy.root_device
        self._table = [{"rank": rank, **peak} for rank, peak in enumerate(_peaks_of_all(device, self._uncounted_bytes))]
        names = [name for name in self._table[0] if name != "rank"]
        log(trainer, {f"memory/{name}": max(row[name] for row in self._table) for name in names}, self._step)


def _peaks_of_all(device: torch.device, uncounted_bytes: int) -> list[dict[str, int]]:
    """Return each rank's peaks, by global rank; collective. `uncounted_bytes`: added to "parameters" on CPUs."""
    if device.type == "cuda":
        peak = {"allocated": memory.peak(device), "reserved": memory.peak_reserved(device)}
        peak = {"total": peak["allocated"], **peak}
    else:
        peak = memory.by_category(at="peak")
        peak["parameters"] += uncounted_bytes
        peak = {"total": sum(peak.values()), **peak}
    if not (dist.is_available() and dist.is_initialized()):
        return [peak]
    local = torch.tensor(list(peak.values()), device=device)
    gathered = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, local)
    return [dict(zip(peak, values.tolist(), strict=True)) for values in gathered]
