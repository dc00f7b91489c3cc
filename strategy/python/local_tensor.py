"""How a forward sees this rank's part of a DTensor parameter.

A parallelized model keeps DTensors in `parameters()` and state dicts, and computes with plain local tensors.
`local_of` is the step between the two. `local_parameters` (and the forward of every parallelized module) makes
plain attribute access, such as `self.weight` in the user's own code, take that step for replicated parameters.
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

from weft.strategy.absent import running


class _ToLocal(torch.autograd.Function):
    """DTensor -> its local tensor; the gradient becomes a DTensor of the same placements.

    The same as DTensor.to_local, at a third of its time.
    """

    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> Tensor:
        ctx.spec = _gradient_spec(parameter)
        local = parameter._local_tensor
        ctx.stride = local.stride()
        ctx.set_materialize_grads(False)
        if running.get() is not None:  # a pipeline's mode must not see this: it is reading, not computing
            with torch._C.DisableTorchFunction():
                return local.view_as(local)
        return local.view_as(local)  # a fresh object: autograd writes into what is returned

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> DTensor | None:
        if grad is None:
            return None
        if grad.stride() != ctx.stride:
            grad = torch.empty_strided(grad.shape, ctx.stride, dtype=grad.dtype, device=grad.device).copy_(grad)
        return DTensor(grad, ctx.spec, requires_grad=False)


class _GradientSpec:
    """A copy of a parameter's spec for its gradients, made once: DTensor code may change a spec it is given."""

    __slots__ = ("copy", "original")

    def __init__(self, original: Any) -> None:
        self.original, self.copy = original, copy.copy(original)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # a copied parameter has a spec of its own


def _gradient_spec(parameter: DTensor) -> Any:
    cached = parameter.__dict__.get("_weft_gradient_spec")
    if cached is None or cached.original is not parameter._spec:
        cached = parameter.__dict__["_weft_gradient_spec"] = _GradientSpec(parameter._spec)
    return cached.copy


def local_of(parameter: Tensor) -> Tensor:
    """This rank's part of a parameter, differentiable; a plain tensor is returned as it is.

    A view of the parameter's own storage. What the caller computes from it must give this rank's part of the
    gradient: for a replicated parameter the same, whole gradient on every rank.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    if torch.compiler.is_compiling():
        return parameter.to_local()
    if parameter.requires_grad and torch.is_grad_enabled():
        return _ToLocal.apply(parameter)
    return parameter._local_tensor


def is_whole(parameter: DTensor) -> bool:
    """Whether the local tensor is the whole parameter: replicated, or on a mesh of one rank."""
    spec = parameter._spec
    return all(
        placement.is_replicate() or size == 1 for placement, size in zip(spec.placements, spec.mesh.shape, strict=True)
    )


class _Depth(threading.local):
    value = 0


_DEPTH = _Depth()


def inside_forward() -> bool:
    """Whether this thread is inside a parallelized forward or `local_parameters`."""
    return _DEPTH.value > 0


@contextlib.contextmanager
def local_parameters() -> Iterator[None]:
    """Inside, reading a replicated parameter as a module's attribute gives the plain local tensor.

    The forward of every parallelized module does this by itself; code outside of a forward that computes with
    parameters (a training step that uses `self.scale`, a `generate` method) runs inside this. Sharded parameters stay
    DTensors: torch refuses to mix them with plain tensors, where a rank's part would silently give wrong numbers.
    Nests; holds for the calling thread.
    """
    _DEPTH.value += 1
    try:
        yield
    finally:
        _DEPTH.value -= 1


def enter_forward() -> None:
    """`local_parameters` without the context manager's cost; pair with `leave_forward`."""
    _DEPTH.value += 1


def leave_forward() -> None:
    _DEPTH.value -= 1
