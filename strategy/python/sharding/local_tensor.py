"""Gives a forward this rank's shard of a DTensor parameter.

A parallelized model keeps DTensors in `parameters()` and state dicts, and computes with plain local tensors.
`local_of` returns the local tensor of a DTensor. Inside `local_parameters` (and the forward of every parallelized
module), plain attribute access, such as `self.weight` in the user's own code, does the same for replicated parameters.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from weft.strategy.sharding.remote_layers import active_mode


class _ToLocal(torch.autograd.Function):
    """DTensor -> its local tensor; the gradient becomes a DTensor of the same placements.

    Equivalent to DTensor.to_local, and takes a third of the time.
    """

    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> Tensor:
        ctx.spec = _gradient_spec(parameter)
        local = parameter._local_tensor
        ctx.stride = local.stride()
        ctx.set_materialize_grads(False)
        if active_mode.get() is not None:  # a pipeline's mode must not intercept this read, which computes nothing
            with torch._C.DisableTorchFunction():
                return local.view_as(local)
        return local.view_as(local)  # a new object: autograd modifies the returned tensor

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> DTensor | None:
        if grad is None:
            return None
        if grad.stride() != ctx.stride:
            grad = torch.empty_strided(grad.shape, ctx.stride, dtype=grad.dtype, device=grad.device).copy_(grad)
        return DTensor(grad, ctx.spec, requires_grad=False)


class _GradientSpec:
    """A copy, made once, of a parameter's spec for its gradients: DTensor code may modify a spec in place."""

    __slots__ = ("copy", "original")

    def __init__(self, original: Any) -> None:
        self.original, self.copy = original, copy.copy(original)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # a copied parameter has its own spec, of which it makes a copy when needed


def _gradient_spec(parameter: DTensor) -> Any:
    cached = parameter.__dict__.get("_weft_gradient_spec")
    if cached is None or cached.original is not parameter._spec:
        cached = parameter.__dict__["_weft_gradient_spec"] = _GradientSpec(parameter._spec)
    return cached.copy


def local_of(parameter: Tensor) -> Tensor:
    """Return this rank's shard of a parameter, differentiable; a plain tensor is returned unchanged.

    The result is a view of the parameter's storage. Computations with it must produce this rank's shard of the
    gradient: for a replicated parameter, the same full gradient on every rank.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    if torch.compiler.is_compiling():
        return parameter.to_local()
    if parameter.requires_grad and torch.is_grad_enabled():
        local: Tensor = _ToLocal.apply(parameter)
        return local
    return parameter._local_tensor


def is_full(parameter: DTensor) -> bool:
    """Return whether the local tensor is the full parameter: each axis replicates it or has one rank."""
    spec = parameter._spec
    return all(
        placement.is_replicate() or size == 1 for placement, size in zip(spec.placements, spec.mesh.shape, strict=True)
    )


class _Thread(threading.local):
    depth = 0  # of nested forwards and `local_parameters`
    mode: TorchFunctionMode | None = None  # that `reading_locals` entered last, also while suspended
    suspended_at = 0  # the depth of the forward that suspended the mode; 0: the mode is active or None


_THREAD = _Thread()


def inside_forward() -> bool:
    """Return whether this thread is inside a parallelized forward or `local_parameters`."""
    return _THREAD.depth > 0


def forward_depth() -> int:
    """Return the number of nested parallelized forwards and `local_parameters` in this thread."""
    return _THREAD.depth


@contextlib.contextmanager
def reading_locals(mode: TorchFunctionMode | None = None) -> Iterator[None]:
    """Inside, reading a replicated parameter as a module's attribute gives the plain local tensor.

    `mode` is active inside, but not in the forwards of parallelized modules, which it would only slow down. If another
    mode is active already, `mode` is not used.
    """
    outer = _THREAD.mode, _THREAD.suspended_at
    if mode is not None and (_THREAD.mode is None or _THREAD.suspended_at):
        _THREAD.mode, _THREAD.suspended_at = mode, 0
    else:
        mode = None
    _THREAD.depth += 1
    try:
        with contextlib.nullcontext() if mode is None else mode:
            yield
    finally:
        _THREAD.mode, _THREAD.suspended_at = outer
        _THREAD.depth -= 1


def enter_forward() -> None:
    """Begin what `reading_locals()` does, without a context manager, and suspend the mode, until `exit_forward`."""
    _THREAD.depth += 1
    if _THREAD.mode is not None and _THREAD.suspended_at == 0:
        _suspend()


def exit_forward() -> None:
    """End what the last `enter_forward` began."""
    if _THREAD.suspended_at == _THREAD.depth and _THREAD.mode is not None:
        _THREAD.mode.__enter__()
        _THREAD.suspended_at = 0
    _THREAD.depth -= 1


def _suspend() -> None:
    """Suspend the mode, but not under torch.compile, nor if a mode entered later must be exited first."""
    if not torch.compiler.is_compiling() and _get_current_function_mode() is _THREAD.mode:
        _THREAD.mode.__exit__(None, None, None)
        _THREAD.suspended_at = _THREAD.depth
