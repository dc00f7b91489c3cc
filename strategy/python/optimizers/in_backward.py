"""Steps the optimizer inside the backward: each gradient is consumed and freed as soon as it is complete."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils.hooks import RemovableHandle

from weft.strategy.modules.stepped_mlp import pause_stepping, step_mlps_by_rows, stop_stepping
from weft.strategy.optimizers.low_precision import LowPrecisionOptimizer
from weft.strategy.optimizers.row_steps import RowSteps

# Exactly these classes: the step of a parameter does not depend on other parameters.
_CLASSES = (Adam, AdamW, SGD)


def why_not_in_backward(optimizer: Optimizer) -> str | None:
    """Return why an optimizer cannot step inside the backward; None if it can."""
    if type(optimizer) not in _CLASSES and not isinstance(optimizer, LowPrecisionOptimizer):
        names = ", ".join(cls.__name__ for cls in _CLASSES)
        name = type(optimizer).__name__
        return f"the optimizer is of class {name}, and only {names} are known to step each parameter alone"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return "the optimizer is differentiable"
    return None


class StepInBackward:
    """Makes an optimizer step each parameter when its gradient is complete, and frees the gradient.

    With `by_rows`, the backward computes the gradient of a fused MLP's weight some rows at a time (1 MiB of them on the
    CPU, about a quarter of the weight and at most 64 MiB on CUDA) and steps these rows, so that the full gradient does
    not exist. A weight that has a hook of the user, or already a gradient, or whose MLP is called several times before
    the backward, gets its full gradient and is stepped like other parameters.

    The optimizer object stays the user's: the options of its groups are read at each step, and its state stays in it.
    Its `step()` must still be called after each backward outside of `accumulating()`; the call finds no gradients, and
    allows the next backward.

    Raises, in a backward:
        RuntimeError: a second backward before `step()`, outside of `accumulating()`; a backward inside another
            one, as reentrant checkpointing runs it; or another gradient of a weight whose rows are updated already,
            from a use of the weight outside of its MLP.
        NotImplementedError: with `by_rows`, a backward with create_graph=True.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        before_step: Callable[[Tensor], object] | None = None,
        by_rows: bool = False,
    ) -> None:
        """
        Args:
            model: holds the optimizer's parameters, and gives them their names in errors.
            optimizer: one of torch's Adam, AdamW, SGD.
            before_step: called before each step with a parameter whose `grad` is complete or, by rows, with a tensor of
                some of its rows; may change the `grad`, for example average or clip it. None: not called.
            by_rows: step the weights of fused MLPs by rows; the model must be parallelized.

        Raises:
            ValueError: the optimizer cannot step inside the backward, or has parameters that are not the model's; or
                `by_rows` is set, and the model has no fused MLP to step by rows, or another StepInBackward steps it.
        """
        if (why_not := why_not_in_backward(optimizer)) is not None:
            raise ValueError(
                f"optimizer_in_backward: {why_not}; step after the backward (optimizer_in_backward=False)."
            )
        self._optimizer = optimizer
        self._before_step = before_step
        # Unwrapped: the wrapper's hooks and profiling must run once for each `step()`, not for each parameter.
        step: Any = type(optimizer).step
        self._optimizer_step: Callable[[Optimizer], Any] = step.__wrapped__
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        num_unknown = sum(
            parameter not in self._names for group in optimizer.param_groups for parameter in group["params"]
        )
        if num_unknown:
            raise ValueError(
                f"optimizer_in_backward: {num_unknown} parameters of the optimizer are not of the model; create the "
                "optimizer with the model's parameters, after parallelize."
            )
        self._is_accumulating = False
        self._stepped: list[Tensor] = []
        self._stepped_by_rows: set[Tensor] = set()
        self._backward: int | None = None  # autograd's id of the backward that has stepped parameters
        self._groups = {p: index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self._rows = RowSteps(optimizer, self._apply, before_step)
        self._mlps = step_mlps_by_rows(model, self._groups, self._step_by_rows) if by_rows else {}
        if by_rows and not self._mlps:
            raise ValueError(
                "optimizer_in_backward='rows' found no fused MLP with weights of its own that are sharded over the "
                "tensor-parallel axis alone; have the plan fuse one as column_row_mlp (weft.strategy.report(model) "
                "says why it did not), or pass optimizer_in_backward=True."
            )
        self._handles: list[RemovableHandle] = [optimizer.register_step_post_hook(self._end)]
        for parameter in self._groups:
            if parameter.requires_grad:
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._step_full))

    @property
    def num_stepped(self) -> int:
        """Return how many parameters were stepped since the last `step()`; above 0, the weights are partly updated."""
        return len(self._stepped)

    @property
    def stepped_by_rows(self) -> list[str]:
        """Return the names of the weights that their MLPs step, until `remove()`."""
        return [name for names in self._mlps.values() for name in names]

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Inside, backwards accumulate gradients in `grad`; the next backward outside adds its own, and steps.

        Weights that are stepped by rows get full gradients then, like all others.
        """
        before, self._is_accumulating = self._is_accumulating, True
        pause_stepping(self._mlps, True)
        try:
            yield
        finally:
            self._is_accumulating = before
            pause_stepping(self._mlps, before)

    def remove(self) -> None:
        """Stop stepping in backwards; the optimizer steps in `step()` again."""
        stop_stepping(self._mlps)
        self._mlps = {}
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _step_full(self, parameter: Tensor) -> None:
        if parameter.grad is None or self._is_accumulating:  # torch also calls this if nothing was accumulated
            return
        self._check_once(parameter)
        if self._before_step is not None:
            self._before_step(parameter)
        self._apply(parameter, parameter)
        parameter.grad = None
        self._stepped.append(parameter)

    def _step_by_rows(self, parameter: Tensor, left: Tensor, right: Tensor) -> None:
        self._check_once(parameter)
        self._stepped.append(parameter)
        self._stepped_by_rows.add(parameter)
        self._rows.step(parameter, left, right)

    def _apply(self, parameter: Tensor, rows: Tensor) -> None:
        """Step a parameter, or rows of it, that have their gradient."""
        groups = self._optimizer.param_groups
        self._optimizer.param_groups = [{**groups[self._groups[parameter]], "params": [rows]}]
        try:
            self._optimizer_step(self._optimizer)
        finally:
            self._optimizer.param_groups = groups

    def _check_once(self, parameter: Tensor) -> None:
        backward = torch._C._current_graph_task_id()
        if not self._stepped:
            self._backward = backward
        elif backward != self._backward:
            raise RuntimeError(
                f"optimizer_in_backward: '{self._names.get(parameter, '?')}' got a gradient from a second backward "
                f"after {len(self._stepped)} parameters had already been updated: call the optimizer's step() after "
                "each backward, accumulate gradients inside of accumulating(), use checkpoints with "
                "use_reentrant=False, or pass optimizer_in_backward=False."
            )
        if parameter in self._stepped_by_rows:
            raise RuntimeError(
                f"optimizer_in_backward='rows': '{self._names.get(parameter, '?')}' got another gradient after its "
                "rows had already been updated: use it in its MLP alone, or pass optimizer_in_backward=True."
            )

    def _end(self, *_: object) -> None:
        self._stepped.clear()
        self._stepped_by_rows.clear()
