"""The optimizer's step inside the backward: a gradient is used up, and freed, as soon as it is complete."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils.hooks import RemovableHandle

# Exactly these: each parameter's step reads nothing of the others.
_CLASSES = (Adam, AdamW, SGD)


def why_not_in_backward(optimizer: Optimizer) -> str | None:
    """Why an optimizer cannot step inside the backward; None where it can."""
    if type(optimizer) not in _CLASSES:
        names = ", ".join(cls.__name__ for cls in _CLASSES)
        name = type(optimizer).__name__
        return f"the optimizer is of class {name}, and only {names} are known to step each parameter alone"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return "the optimizer is differentiable"
    return None


class StepInBackward:
    """Has an optimizer step each parameter when its gradient is complete, and frees the gradient.

    The optimizer object stays the user's: its groups' options are read at that moment, its state lives in it, and its
    `step()` is still to be called after the backward; it finds no gradients, ends the step, and lets the next begin.

    Raises, in a backward:
        RuntimeError: a second backward before `step()`, which would be accumulation, or one inside the backward, as
            reentrant checkpointing runs it.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        before_step: Callable[[Tensor], object] | None = None,
    ) -> None:
        """
        Args:
            model: gives the parameters their names in errors.
            optimizer: one of torch's Adam, AdamW, SGD.
            before_step: called with each parameter that has got its gradient.

        Raises:
            ValueError: the optimizer cannot step inside the backward, or has parameters that are not the model's.
        """
        if (why_not := why_not_in_backward(optimizer)) is not None:
            raise ValueError(
                f"optimizer_in_backward: {why_not}; step after the backward (optimizer_in_backward=False)."
            )
        self._optimizer = optimizer
        self._before_step = before_step
        # Without what runs once a step: the hooks of users and profilers, and the counts of schedulers.
        self._own_step: Callable[[Optimizer], Any] = type(optimizer).step.__wrapped__
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        strange = sum(parameter not in self._names for group in optimizer.param_groups for parameter in group["params"])
        if strange:
            raise ValueError(
                f"optimizer_in_backward: {strange} parameters of the optimizer are not of the model; make the "
                "optimizer of the model's parameters, after parallelize."
            )
        self._stepped: list[Tensor] = []
        self._backward: int | None = None
        self._handles: list[RemovableHandle] = [optimizer.register_step_post_hook(self._end)]
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if parameter.requires_grad:
                    hook = self._hook_of(index)
                    self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    @property
    def num_stepped(self) -> int:
        """Parameters that have been stepped since the last `step()`: not 0 means that weights are partly updated."""
        return len(self._stepped)

    def remove(self) -> None:
        """Leave the optimizer as it was."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _hook_of(self, index: int) -> Callable[[Tensor], None]:
        def step(parameter: Tensor) -> None:
            self._check_once(parameter)
            if self._before_step is not None:
                self._before_step(parameter)
            groups = self._optimizer.param_groups
            self._optimizer.param_groups = [{**groups[index], "params": [parameter]}]
            try:
                self._own_step(self._optimizer)
            finally:
                self._optimizer.param_groups = groups
            parameter.grad = None
            self._stepped.append(parameter)

        return step

    def _check_once(self, parameter: Tensor) -> None:
        backward = torch._C._current_graph_task_id()
        if not self._stepped:
            self._backward = backward
        elif backward != self._backward:
            raise RuntimeError(
                f"optimizer_in_backward: '{self._names.get(parameter, '?')}' got a gradient from a second backward "
                f"after {len(self._stepped)} parameters were stepped, which are updated now: call the optimizer's "
                "step() after each backward, without gradient accumulation or reentrant checkpointing "
                "(use_reentrant=False), or pass optimizer_in_backward=False."
            )

    def _end(self, *_: object) -> None:
        self._stepped.clear()
