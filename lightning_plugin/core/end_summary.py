"""Logs a line when a training ends: the time of a batch, the speed of all ranks, and the peak of memory."""

from __future__ import annotations

import statistics
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from weft import memory
from weft._plugin.throughput_monitor import first_dim

if TYPE_CHECKING:
    from weft._plugin.engine import Engine

_NUM_TIMES = 1000  # of the newest batches


class EndSummary:
    """Measures the times from one batch to the next, and logs their median on the first rank.

    If gradients are accumulated, it is the median over steps of the mean time of a step's batches. The median leaves
    validations and checkpoints out. The peak is that of the rank with the most: on CUDA what torch has allocated, on
    CPUs what `weft.memory` has counted, if it counts.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._num_batches = 0
        self._last = 0.0
        self._seconds: deque[float] = deque(maxlen=_NUM_TIMES)
        self._rows = self._tokens = 0
        self._batches_of_step = 1

    def begin(self, batches_of_step: int = 1) -> None:
        self._num_batches = 0
        self._batches_of_step = batches_of_step
        self._seconds.clear()

    def batch_begins(self, batch: Any) -> None:
        now = time.perf_counter()
        if self._num_batches > 0:
            self._seconds.append(now - self._last)
        self._last = now
        self._num_batches += 1
        if self._num_batches == 1:
            self._rows, self._tokens = _rows_of(batch), _tokens_of(batch)

    def log(self) -> None:
        """Log the line, if at least one step and a batch were trained on each rank; collective."""
        from weft.strategy.reports.charts import number

        engine = self._engine
        times = list(self._seconds)
        size = self._batches_of_step
        steps = [sum(times[i : i + size]) / size for i in range(0, len(times) - size + 1, size)]
        peak = self._largest_peak(has_times=bool(steps))
        if peak is None:
            return
        seconds = statistics.median(steps)
        num_data = engine.data_axes.size
        counts = {"rows": self._rows, "tokens": self._tokens}
        speeds = [f"{number(num_data * count / seconds)} {name}/s" for name, count in counts.items() if count]
        text = f"weft: trained {self._num_batches} batches, the median in {seconds:.4g} s"
        text += f": {' and '.join(speeds)} of all ranks" if speeds else ""
        text += f"; at most {peak[0] / 1e6:,.3f} MB at the peak, on rank {peak[1]}" if peak[0] >= 0 else ""
        engine.console.log(f"{text}.")

    def _largest_peak(self, has_times: bool) -> tuple[int, int] | None:
        """Return the bytes (-1: not known) and the global rank of the largest peak; None: a rank has no times.

        Collective.
        """
        device = self._engine.device
        own = memory.peak(device) if device.type == "cuda" else memory.peak() if memory.is_tracking() else -1
        values = torch.tensor([own, int(has_times)], device=device)
        gathered = values.new_empty(dist.get_world_size() * values.numel())
        dist.all_gather_into_tensor(gathered, values)
        peaks, have_times = (column.tolist() for column in gathered.view(-1, 2).unbind(1))
        if not all(have_times):
            return None
        largest = max(peaks) if min(peaks) >= 0 else -1
        return largest, peaks.index(max(peaks))


def _rows_of(batch: Any) -> int:
    try:
        return first_dim(batch)
    except (ValueError, TypeError, IndexError):
        return 0


def _tokens_of(batch: Any) -> int:
    """Return the elements of the first tensor if it looks like token ids: integers with two dims; else 0."""
    first = next((leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)), None)
    if first is None or first.dim() != 2 or first.dtype not in (torch.int32, torch.int64):
        return 0
    return first.numel()
