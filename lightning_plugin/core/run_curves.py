"""The curves of a run's report: numbers by name at steps, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_MOST_POINTS = 1000


class Curves:
    """Points at every `interval`-th step; from 1,000 points on, every second one is dropped and the interval doubles.

    All ranks add points at the same steps, so that they know when the next is due; only `keeps` says whether this rank
    stores them.

    Attributes:
        points: for a step each, {"step", "values"}, where a value that is not finite is None.
        interval: the steps between two points.
    """

    def __init__(self, interval: int, keeps: bool) -> None:
        self.points: list[dict[str, Any]] = []
        self.interval = interval
        self._keeps = keeps
        self._num_points = 0
        self._logged: dict[str, float] = {}
        self._loss: Tensor | None = None  # the sum of the losses since the last point
        self._num_losses = 0

    def add_loss(self, loss: Any, factor: float) -> None:
        """Add a batch's loss, times `factor`, to the mean of the next point; ignore all but tensors of one element."""
        if isinstance(loss, Tensor) and loss.numel() == 1:
            scaled = loss.detach().double().reshape(()) * factor
            self._loss = scaled if self._loss is None else self._loss + scaled
            self._num_losses += 1

    def add_point(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point with `values` and the mean loss since the last point."""
        values = dict(values)
        if self._loss is not None:
            values["mean loss"] = float(self._loss) / self._num_losses
        self._loss, self._num_losses = None, 0
        self._store(step, values)
        self._num_points += 1
        if self._num_points >= _MOST_POINTS:
            self.interval *= 2
            self.points = self.points[1::2]
            self._num_points //= 2

    def add_logged(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add the values that have changed since the last call to the point of `step`, which is made if necessary."""
        found: dict[str, float] = {}
        for name, value in metrics.items():
            if torch.as_tensor(value).numel() == 1:
                found[name] = float(value)
        changed = {name: value for name, value in found.items() if not _equal(value, self._logged.get(name))}
        self._logged |= found
        if changed:
            self._store(step, changed)

    def _store(self, step: int, values: Mapping[str, float]) -> None:
        if not self._keeps:
            return
        if not self.points or self.points[-1]["step"] != step:
            self.points.append({"step": step, "values": {}})
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}  # JSON has no NaN
        self.points[-1]["values"].update(finite)


def _equal(value: float, before: float | None) -> bool:
    return before is not None and (value == before or (math.isnan(value) and math.isnan(before)))
