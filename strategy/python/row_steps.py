"""A weight's optimizer step some rows at a time: the gradient of those rows is all that ever exists of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from weft.strategy.data_parallel.local import local_part

# The bytes of the gradient that exist at a time. They stay in the caches until they are used, and products of fewer
# rows are slow.
_BLOCK_BYTES = 1 << 20
# Their states begin as zeros; the momentum of SGD begins as the first gradient.
_FROM_ZERO = (Adam, AdamW)


class RowSteps:
    """Steps weights of an optimizer that treats each element alone (Adam, AdamW, SGD), rows after rows.

    What that leaves in `optimizer.state` is what a step of the whole weight leaves there.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        step: Callable[[Tensor, Tensor], None],
        before_step: Callable[[Tensor], object] | None = None,
        block_bytes: int = _BLOCK_BYTES,
    ) -> None:
        """
        Args:
            optimizer: whose states are used, and made at a weight's first step.
            step: called with a parameter and some rows of it, which have their gradient: steps those.
            before_step: called with some rows before that.
            block_bytes: of a gradient that exist at a time; a row at least.
        """
        self._optimizer = optimizer
        self._step = step
        self._before_step = before_step
        self.block_bytes = block_bytes

    def step(self, parameter: Tensor, left: Tensor, right: Tensor) -> None:
        """Step `parameter`, `[rows, columns]` on this rank, whose gradient is leftᵀ right.

        Args:
            left: `[tokens, rows]`.
            right: `[tokens, columns]`.
        """
        weight = local_part(parameter)
        num_rows, num_columns = weight.shape
        rows_at_once = max(1, self.block_bytes // max(1, num_columns * weight.element_size()))
        buffer = torch.empty(min(rows_at_once, num_rows), num_columns, dtype=left.dtype, device=weight.device)
        before = self._states_before(parameter, weight)
        after: dict[str, Any] = {name: value for name, value in before.items() if _is_like(value, weight)}
        for first in range(0, max(1, num_rows), rows_at_once):  # a rank without rows counts its steps, too
            rows = weight[first : first + rows_at_once]
            gradient = torch.mm(left[:, first : first + len(rows)].t(), right, out=buffer[: len(rows)])
            rows.grad = gradient.to(rows.dtype)
            if self._before_step is not None:
                self._before_step(rows)
            states = {name: _rows_of(value, weight, first, len(rows)) for name, value in before.items()}
            for name, value in self._stepped(parameter, rows, states).items():
                if not _is_like(value, rows):
                    after[name] = value
                elif name not in before:
                    if name not in after:
                        after[name] = torch.zeros_like(parameter)
                    local_part(after[name])[first : first + len(rows)] = value
        if after:
            self._optimizer.state[parameter].update(after)

    def _states_before(self, parameter: Tensor, weight: Tensor) -> dict[str, Any]:
        """What the optimizer has of a parameter; at its first step zeros, if that is what it begins with."""
        states = {name: value for name, value in self._optimizer.state.get(parameter, {}).items() if value is not None}
        if states or not isinstance(self._optimizer, _FROM_ZERO):
            return states
        number = weight.new_zeros(1, 1)  # one step of it shows which states there are
        number.grad = torch.zeros_like(number)
        made = self._stepped(parameter, number, {})
        return {
            name: torch.zeros_like(parameter) if _is_like(value, number) else torch.zeros_like(value)
            for name, value in made.items()
        }

    def _stepped(self, parameter: Tensor, rows: Tensor, states: dict[str, Any]) -> dict[str, Any]:
        """Step some rows; returns their states."""
        if states:
            self._optimizer.state[rows] = states
        try:
            self._step(parameter, rows)
        finally:
            states = self._optimizer.state.pop(rows, {})
        return states


def _is_like(value: object, weight: Tensor) -> bool:
    """Whether a state has an entry for each element of a weight, or of rows of it."""
    return isinstance(value, Tensor) and local_part(value).shape == weight.shape


def _rows_of(value: Any, weight: Tensor, first: int, num_rows: int) -> Any:
    """A state for some rows: a view of it where there is an entry for each element, else a copy of its own."""
    if _is_like(value, weight):
        return local_part(value)[first : first + num_rows]
    return value.clone() if isinstance(value, Tensor) else value
