"""Steps a weight some rows at a time, so that only the gradient of those rows exists."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from weft.strategy import _plan
from weft.strategy.data_parallel.local import local_shard
from weft.strategy.optimizers import state_shards
from weft.strategy.optimizers.low_precision import LowPrecisionOptimizer
from weft.strategy.optimizers.offloaded_states import OffloadedOptimizer

# Optimizers whose elementwise states begin as zeros; the momentum of SGD begins as the first gradient.
_FROM_ZERO = (Adam, AdamW)


class RowSteps:
    """Steps weights in blocks of rows, by an optimizer that updates each row alone (Adam, AdamW, SGD).

    `optimizer.state` ends up as after a step of the full weight.

    rows_per_block: returns how many rows of a weight are stepped at a time, at least 1.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        step: Callable[[Tensor, Tensor], None],
        before_step: Callable[[Tensor], object] | None = None,
    ) -> None:
        """
        Args:
            optimizer: its states are used, and created at a weight's first step.
            step: called with a parameter and a block of its rows, whose `grad` is set; steps this block.
            before_step: called with the block before `step`.
        """
        self._optimizer = optimizer
        self._step = step
        self._before_step = before_step
        self.rows_per_block: Callable[[Tensor], int] = rows_per_block

    def step(self, parameter: Tensor, left: Tensor, right: Tensor) -> None:
        """Step `parameter`, `[rows, columns]` on this rank, whose gradient is leftᵀ right.

        Args:
            left: `[tokens, rows]`.
            right: `[tokens, columns]`.
        """
        if isinstance(self._optimizer, OffloadedOptimizer):
            with self._optimizer.stepping(parameter):
                self._step_all(parameter, left, right)
        else:
            self._step_all(parameter, left, right)

    def _step_all(self, parameter: Tensor, left: Tensor, right: Tensor) -> None:
        weight = local_shard(parameter)
        before = self._states_before(parameter, weight)
        after: dict[str, Any] = {name: value for name, value in before.items() if _has_rows(value, weight)}
        for first, rows in self._blocks(weight, left, right):
            if self._before_step is not None:
                self._before_step(rows)
            shares = isinstance(self._optimizer, LowPrecisionOptimizer)
            states = {name: _rows_of(value, weight, first, len(rows), shares) for name, value in before.items()}
            for name, value in self._step_rows(parameter, rows, first, states).items():
                if not _has_rows(value, rows):
                    after[name] = value
                elif name not in before:
                    if name not in after:
                        after[name] = _zeros_like(parameter, value.device)
                    local_shard(after[name])[first : first + len(rows)] = value
        if after:
            self._optimizer.state[parameter].update(after)

    def gradients(self, parameter: Tensor, left: Tensor, right: Tensor) -> Iterator[Tensor]:
        """Yield the gradients of blocks of rows, `[rows of the block, columns]`, one at a time; see `step`."""
        for _, rows in self._blocks(local_shard(parameter), left, right):
            if self._before_step is not None:
                self._before_step(rows)
            assert rows.grad is not None
            yield rows.grad

    def _blocks(self, weight: Tensor, left: Tensor, right: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield (first row, rows of `weight` with their `grad`), each valid until the next."""
        num_rows, num_columns = weight.shape
        rows_at_once = self.rows_per_block(weight)
        buffer = torch.empty(min(rows_at_once, num_rows), num_columns, dtype=left.dtype, device=weight.device)
        for first in range(0, max(1, num_rows), rows_at_once):  # a rank without rows also counts its steps
            rows = weight[first : first + rows_at_once]
            gradient = torch.mm(left[:, first : first + len(rows)].t(), right, out=buffer[: len(rows)])
            rows.grad = gradient.to(rows.dtype)
            yield first, rows

    def _states_before(self, parameter: Tensor, weight: Tensor) -> dict[str, Any]:
        """Return the optimizer's states of a parameter; before its first step, those that a step would begin with.

        SGD has none before its first step.
        """
        states = {name: value for name, value in self._optimizer.state.get(parameter, {}).items() if value is not None}
        if isinstance(self._optimizer, LowPrecisionOptimizer):
            return states if "step" in states else {**states, **self._optimizer.initial_states(parameter)}
        if states or not isinstance(self._optimizer, _FROM_ZERO):
            return states
        number = weight.new_zeros(1, 1)  # stepping it once shows which states the optimizer keeps
        number.grad = torch.zeros_like(number)
        made = self._step_rows(parameter, number, 0, {})
        return {
            name: torch.zeros_like(parameter) if _has_rows(value, number) else torch.zeros_like(value)
            for name, value in made.items()
        }

    def _step_rows(self, parameter: Tensor, rows: Tensor, first: int, states: dict[str, Any]) -> dict[str, Any]:
        """Step some rows, the first of which is row `first` of the local shard; return their states."""
        optimizer = self._optimizer
        if states:
            optimizer.state[rows] = states
        if isinstance(optimizer, LowPrecisionOptimizer):
            optimizer.begin_rows(rows, parameter, first)
        try:
            self._step(parameter, rows)
        finally:
            states = optimizer.state.pop(rows, {})
            if isinstance(optimizer, LowPrecisionOptimizer):
                optimizer.end_rows(rows)
        return states


def rows_per_block(weight: Tensor) -> int:
    """Return how many rows of a weight are stepped at a time, at least 1; the memory model predicts the same."""
    num_rows, num_columns = weight.shape
    device = "cuda" if weight.is_cuda else "cpu"
    return _plan.rows_per_block(device, num_rows, num_columns * weight.element_size())


def _zeros_like(parameter: Tensor, device: torch.device) -> Tensor:
    """Return zeros for a state of a parameter, on the device of the states."""
    if device == parameter.device:
        return torch.zeros_like(parameter)
    return state_shards.new_state(parameter, parameter.dtype, device)


def _has_rows(value: object, weight: Tensor) -> bool:
    """Return whether a state has a row for each row of a weight: entries for its elements, or scales of its blocks."""
    if not isinstance(value, Tensor):
        return False
    local = local_shard(value)
    return local.dim() == weight.dim() and len(local) == len(weight)


def _rows_of(value: Any, weight: Tensor, first: int, num_rows: int, shares: bool) -> Any:
    """Return the state of some rows: a view if the state has these rows, else a copy, or itself if `shares`."""
    if _has_rows(value, weight):
        return local_shard(value)[first : first + num_rows]
    return value.clone() if isinstance(value, Tensor) and not shares else value
