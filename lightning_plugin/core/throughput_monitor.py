"""The mixin of ThroughputMonitor, a callback that logs the speed of training; `factory.py` adds the base class."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from weft._plugin.monitors import check_at_least_one, log, num_steps


class _Mark(NamedTuple):
    """This rank's counts since training began, at the end of a step, and the time without validation."""

    step: int
    seconds: float
    samples: float
    tokens: float
    flops: float


class ThroughputMixin:
    """Logs samples and tokens per second of training, of all devices and per device, and the model FLOPs utilization.

    Ranks that compute one batch together (with tensor or context parallelism, or a pipeline) count the batch once. Logs
    every `log_every_n_steps` of the Trainer; the time of validation does not count:

    - "throughput/samples_per_second", "throughput/tokens_per_second" and "throughput/flops_per_second" over all ranks,
    - "throughput/device/samples_per_second" and so on: these divided by the number of devices,
    - "throughput/mfu": "throughput/device/flops_per_second" / `peak_flops`.

    Args:
        batch_size_fn: returns a batch's number of samples; None: the size of the first dim of the batch's first tensor.
        length_fn: returns a batch's number of tokens, or of other units; None: they are not counted.
        flops_per_sample: the model's floating-point operations per sample, forward and backward, of all ranks
            together; or a function that returns this number for a batch. None: not counted.
        peak_flops: peak floating-point operations per second of one device; None: no "throughput/mfu".
        window_size: the number of newest steps to average over, rounded up to full logging intervals.
    """

    _clock = staticmethod(time.perf_counter)

    def __init__(
        self,
        batch_size_fn: Callable[[Any], int] | None = None,
        length_fn: Callable[[Any], int] | None = None,
        flops_per_sample: float | Callable[[Any], float] | None = None,
        peak_flops: float | None = None,
        window_size: int = 100,
    ) -> None:
        super().__init__()
        if peak_flops is not None and (flops_per_sample is None or not peak_flops > 0):
            raise ValueError(
                f"ThroughputMonitor got peak_flops={peak_flops!r} with flops_per_sample={flops_per_sample!r}; pass the "
                "positive flops per second of one device together with flops_per_sample."
            )
        check_at_least_one("ThroughputMonitor", "window_size", window_size)
        self._batch_size_fn = batch_size_fn or first_dim
        self._length_fn = length_fn
        self._flops_per_sample = flops_per_sample
        self._peak_flops = peak_flops
        self._window_size = window_size
        self._marks: deque[_Mark] = deque()  # one at the start of training and one at each log, the newest last
        self._step = 0
        self._samples = self._tokens = self._flops = 0.0  # of this rank since the training began
        self._paused = self._paused_at = 0.0  # seconds spent in validation, and when the last validation began

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._marks.clear()
        self._samples = self._tokens = self._flops = self._paused = 0.0
        self._step = num_steps(trainer, pl_module)
        self._mark(trainer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        num_samples = self._batch_size_fn(batch)
        self._samples += num_samples
        if self._length_fn is not None:
            self._tokens += self._length_fn(batch)
        if self._flops_per_sample is not None:
            flops = self._flops_per_sample
            self._flops += num_samples * (flops(batch) if callable(flops) else flops)
        before, self._step = self._step, num_steps(trainer, pl_module)
        every = trainer.log_every_n_steps
        # A batch whose gradients are only accumulated does not change the step.
        if every and self._step != before and self._step % every == 0:
            self._mark(trainer)
            log(trainer, self._rates(trainer), self._step)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._paused_at = self._now(trainer)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._paused += self._now(trainer) - self._paused_at

    def _now(self, trainer: Any) -> float:
        device = trainer.strategy.root_device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return self._clock()

    def _mark(self, trainer: Any) -> None:
        seconds = self._now(trainer) - self._paused
        self._marks.append(_Mark(self._step, seconds, self._samples, self._tokens, self._flops))
        while len(self._marks) > 2 and self._marks[1].step <= self._step - self._window_size:
            self._marks.popleft()

    def _rates(self, trainer: Any) -> dict[str, float]:
        first, last = self._marks[0], self._marks[-1]
        deltas = [later - earlier for later, earlier in zip(last[1:], first[1:], strict=True)]
        if trainer.world_size > 1:
            deltas = _mean_over_world(deltas, trainer.strategy)
        replicas = num_data_ranks(trainer.strategy)
        seconds, *counts = deltas
        wanted = {
            "samples": True,
            "tokens": self._length_fn is not None,
            "flops": self._flops_per_sample is not None,
        }
        rates: dict[str, float] = {}
        for (name, is_wanted), count in zip(wanted.items(), counts, strict=True):
            if is_wanted:
                rates[f"throughput/{name}_per_second"] = rate = count * replicas / seconds
                rates[f"throughput/device/{name}_per_second"] = rate / trainer.world_size
        if self._peak_flops is not None:
            rates["throughput/mfu"] = rates["throughput/device/flops_per_second"] / self._peak_flops
        return rates


def num_data_ranks(strategy: Any) -> int:
    """Return the number of data-parallel ranks, from the strategy's sampler arguments; 1 if it has none."""
    arguments: dict[str, int] = getattr(strategy, "distributed_sampler_kwargs", {"num_replicas": 1})
    return arguments["num_replicas"]


def _mean_over_world(values: list[float], strategy: Any) -> list[float]:
    """Return means over all ranks. Ranks with the same batch have equal counts: means of counts are over data ranks."""
    group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    tensor = torch.tensor(values, dtype=torch.float64, device=strategy.root_device)
    means: list[float] = strategy.reduce(tensor, group=group, reduce_op="mean").tolist()
    return means


def first_dim(batch: Any) -> int:
    """Return the size of the first dim of a batch's first tensor; raises ValueError without one."""
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.dim():
            return leaf.shape[0]
    raise ValueError(
        f"ThroughputMonitor got a batch of type {type(batch).__name__} without a tensor whose first dim could be the "
        "number of samples; pass batch_size_fn."
    )
