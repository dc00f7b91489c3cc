"""Steps the optimizer inside the backward: each gradient is consumed and freed as soon as it is complete."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils.hooks import RemovableHandle

from weft.strategy.data_parallel.clipping import GradientNorm, clip_gradients_by_norm, clipping_factor
from weft.strategy.data_parallel.local import local_shard
from weft.strategy.modules.activation_checkpointing import has_selective_checkpoints
from weft.strategy.modules.stepped_mlp import pause_stepping, step_mlps_by_rows, stop_stepping
from weft.strategy.optimizers.low_precision import LowPrecisionOptimizer
from weft.strategy.optimizers.offloaded_states import OffloadedOptimizer
from weft.strategy.optimizers.row_steps import RowSteps

# Exactly these classes: the step of a parameter does not depend on other parameters.
_CLASSES = (Adam, AdamW, SGD)


def why_not_in_backward(optimizer: Optimizer) -> str | None:
    """Return why an optimizer cannot step inside the backward; None if it can."""
    cls = optimizer.stepped_class if isinstance(optimizer, OffloadedOptimizer) else type(optimizer)
    if cls not in _CLASSES and not isinstance(optimizer, LowPrecisionOptimizer):
        names = ", ".join(cls.__name__ for cls in _CLASSES)
        name = cls.__name__
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
        self._model = model
        self._before_step = before_step
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
        self._has_accumulated = False  # since the last `step()`
        self._norm: GradientNorm | None = None  # in a run of a backward that only adds up the norm
        self._factor: Tensor | None = None  # `[]`, by which gradients are scaled
        self._due: Collection[Tensor] | None = None  # inside of `stepping_only`
        self._stepped: dict[Tensor, None] = {}
        self._stepped_by_rows: set[Tensor] = set()
        self._backward: int | None = None  # autograd's id of the backward that has stepped parameters
        self._groups = {p: index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self._rows = RowSteps(optimizer, self._apply, self._prepare)
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
        self._has_accumulated = True
        pause_stepping(self._mlps, True)
        try:
            yield
        finally:
            self._is_accumulating = before
            pause_stepping(self._mlps, before)

    def backward(self, loss: Tensor, max_norm: float, norm_type: float = 2.0) -> Tensor | None:
        """Run the backward of a loss with all gradients clipped to the norm `max_norm`; see `clipped_backward`."""
        return self.clipped_backward(lambda retains: loss.backward(retain_graph=retains), max_norm, norm_type)

    def clipped_backward(
        self, backward: Callable[[bool], object], max_norm: float, norm_type: float = 2.0
    ) -> Tensor | None:
        """Run a backward that steps, with all gradients clipped to the norm `max_norm`; collective over shards.

        The norm is known only after all gradients. So the backward runs twice: the first run adds each gradient to the
        norm and frees it, the second run computes each gradient again, scales it and steps. Activations stay in memory
        until the second run. If earlier backwards have accumulated gradients, all of which exist at the end, there is
        one run, and the gradients are scaled and stepped after it.

        Args:
            backward: runs the backward; its argument tells whether to retain the graph.
            max_norm, norm_type: as in `clip_gradients_by_norm`.

        Returns:
            The norm before clipping, `[]`, as `clip_gradients_by_norm` returns it; inside of `accumulating()`, where
            gradients are neither clipped nor stepped, None.

        Raises:
            RuntimeError: the model has selective checkpoints, which support one backward.
        """
        if self._is_accumulating:
            backward(False)
            return None
        if has_selective_checkpoints(self._model):
            raise RuntimeError(
                "optimizer_in_backward: clipping by norm runs the backward twice, and selective checkpoints support "
                "one; use full checkpoints, or pass optimizer_in_backward=False."
            )
        if self._has_accumulated:
            return self._clip_accumulated(backward, max_norm, norm_type)
        self._norm = norm = GradientNorm(norm_type, self._groups)
        try:
            backward(True)
        finally:
            self._norm = None
        total = norm.total()
        self._factor = clipping_factor(total, max_norm)
        try:
            backward(False)
        finally:
            self._factor = None
        return total

    def _clip_accumulated(self, backward: Callable[[bool], object], max_norm: float, norm_type: float) -> Tensor:
        with self.accumulating():
            backward(False)
        for parameter in self._groups:
            if parameter.grad is not None:
                self._prepare(parameter)
        norm = clip_gradients_by_norm(self._groups, max_norm, norm_type)
        for parameter in self._groups:
            if parameter.grad is not None:
                self._step_prepared(parameter)
        return norm

    @property
    def parameters(self) -> Collection[Tensor]:
        """Return the optimizer's parameters."""
        return self._groups.keys()

    @property
    def is_accumulating(self) -> bool:
        """Return whether backwards only accumulate gradients now."""
        return self._is_accumulating

    @contextlib.contextmanager
    def stepping_only(self, parameters: Collection[Tensor]) -> Iterator[None]:
        """Inside, backwards step only these parameters, and accumulate the gradients of others.

        Several backwards may then belong to one step, as those of a pipeline's stages: the caller makes sure that no
        backward that is still to come needs the old values.
        """
        before, self._due = self._due, parameters
        try:
            yield
        finally:
            self._due = before

    def step_gradients(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Step those of `parameters` that have a gradient, and free it; None: of all parameters."""
        chosen = set(self._groups if parameters is None else parameters)
        with self.stepping_only(chosen):
            for parameter in self._groups:  # in the order of the optimizer, because averaging communicates
                if parameter in chosen:
                    self._step_full(parameter)

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
        if self._due is not None and parameter not in self._due:
            return
        if self._norm is not None:
            self._prepare(parameter)
            self._norm.add([parameter.grad])
            parameter.grad = None
            return
        self._check_once(parameter)
        self._prepare(parameter)
        self._step_prepared(parameter)

    def _prepare(self, parameter: Tensor) -> None:
        """Average and scale the complete gradient of a parameter, or of some of its rows."""
        if self._before_step is not None:
            self._before_step(parameter)
        if self._factor is not None:
            assert parameter.grad is not None
            local_shard(parameter.grad).mul_(self._factor.to(parameter.grad.dtype))

    def _step_prepared(self, parameter: Tensor) -> None:
        self._apply(parameter, parameter)
        parameter.grad = None
        self._stepped[parameter] = None

    def _step_by_rows(self, parameter: Tensor, left: Tensor, right: Tensor) -> None:
        if self._norm is not None:
            for rows in self._rows.gradients(parameter, left, right):
                self._norm.add_shard(parameter, rows)
            return
        self._check_once(parameter)
        self._stepped[parameter] = None
        self._stepped_by_rows.add(parameter)
        self._rows.step(parameter, left, right)

    def _apply(self, parameter: Tensor, rows: Tensor) -> None:
        """Step a parameter, or rows of it, that have their gradient."""
        groups = self._optimizer.param_groups
        self._optimizer.param_groups = [{**groups[self._groups[parameter]], "params": [rows]}]
        try:
            if isinstance(self._optimizer, OffloadedOptimizer):
                self._optimizer.step_gradients()
                return
            # Unwrapped: the wrapper's hooks and profiling must run once for each `step()`, not for each parameter. Read
            # each time, because `fuse` and `offload_states` change the class.
            step: Any = type(self._optimizer).step
            step.__wrapped__(self._optimizer)
        finally:
            self._optimizer.param_groups = groups

    def _check_once(self, parameter: Tensor) -> None:
        backward = torch._C._current_graph_task_id()
        if not self._stepped:
            self._backward = backward
        elif parameter in self._stepped if self._due is not None else backward != self._backward:
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
        self._has_accumulated = False
