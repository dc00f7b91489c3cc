"""Lets code outside of a forward compute with parameters that are DTensors.

A loss term, a norm for the log or an exponential average reads `self.parameters()`, some of which are sharded, and
combines the results with plain tensors. DTensor raises for most operations that mix both. `FullResults` computes on the
shards where DTensor can, and gathers where it cannot. Here, a number is a tensor without dims.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from weft.strategy.data_parallel.local import shard_like
from weft.strategy.sharding.local_tensor import reading_locals
from weft.strategy.sharding.shards import TENSOR_PARALLEL

# Names of functions that read values: they need full tensors.
_READS = {"item", "tolist", "numpy", "tensor", "as_tensor", "__array__", "__format__", "__contains__"}
_READS |= {f"__{name}__" for name in ("float", "int", "bool", "index", "complex")}
_VIEWS = {"flatten", "ravel", "reshape", "unflatten", "view"}  # DTensor supports them only for even shards
# Properties, and functions that need the parameters themselves.
_PARAMETER_ACCESS = {"__get__", "__set__", "__delete__", "grad", "backward", "requires_grad_", "__hash__", "__repr__"}
_PARAMETER_ACCESS |= {
    "register_hook",
    "register_post_accumulate_grad_hook",
    "retain_grad",
    "__deepcopy__",
    "__reduce_ex__",
}


class _Full(torch.autograd.Function):
    """DTensor -> the full tensor on every rank; collective in the forward and in the backward.

    The gradient may depend on a rank's data: along all axes but the tensor-parallel one it is averaged, as gradients
    of parameters are.
    """

    @staticmethod
    def forward(ctx: Any, tensor: DTensor) -> Tensor:
        ctx.like = tensor.detach()
        return tensor.full_tensor()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> DTensor:
        like: DTensor = ctx.like
        mesh = like.device_mesh
        grad = grad.contiguous()
        for axis in _data_axes(mesh):
            grad = grad / mesh.size(axis)
            dist.all_reduce(grad, group=mesh.get_group(axis))
        replicated = DTensor.from_local(grad, mesh, [Replicate()] * mesh.ndim, run_check=False)
        if any(placement.is_partial() for placement in like.placements):
            return replicated
        return replicated.redistribute(placements=like.placements)


class _RestorePlacements(torch.autograd.Function):
    """Returns a parameter unchanged; its gradient gets the parameter's placements, as FSDP2 and optimizers expect."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> Tensor:
        ctx.placements = parameter.placements
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> DTensor:
        return grad.redistribute(placements=ctx.placements)


def _data_axes(mesh: DeviceMesh) -> list[int]:
    names = mesh.mesh_dim_names or (None,) * mesh.ndim
    return [axis for axis, name in enumerate(names) if name != TENSOR_PARALLEL and mesh.size(axis) > 1]


def full(tensor: Tensor) -> Tensor:
    """Return the full tensor of a DTensor, plain and differentiable; a plain tensor unchanged. Collective."""
    return _Full.apply(tensor) if isinstance(tensor, DTensor) else tensor


@contextlib.contextmanager
def local_parameters() -> Iterator[None]:
    """Inside, code outside of a forward computes with parameters as on one device.

    Reading a replicated parameter as a module's attribute gives the plain local tensor. A number computed from DTensors
    (such as those of `parameters()`) is a plain tensor with the value and the gradients of one device. An operation
    that combines a DTensor with a plain tensor, or with a DTensor on another mesh, may all-gather. So all ranks must
    run the same code.

    The Trainer runs steps, and the hooks between a backward and the optimizer's step, inside this context. With a plan,
    Trainer and Fabric also run the optimizer's step inside it, unless the optimizer is known to step each element
    independently. Other code that computes with parameters (a Fabric loop, a `generate` method) must enter the context.
    Inside the forward of a parallelized module, its only effect is that attributes of replicated parameters are local
    tensors. Contexts can be nested, and apply to the calling thread only.
    """
    with reading_locals(FullResults()):
        yield


class FullResults(TorchFunctionMode):
    """Inside, a number computed from DTensors is a plain tensor with the value that one device computes.

    Results with dims stay DTensors, except views that DTensor does not support, until an operation combines them with a
    plain tensor or with a DTensor on another mesh.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling() or not _has_dtensor(args, kwargs):
            return func(*args, **kwargs)
        return self._compute(func, args, kwargs)

    def full(self, tensor: DTensor) -> Tensor:
        """See the function `full`."""
        return full(tensor)

    def _compute(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = getattr(func, "__name__", "")
        if name in _PARAMETER_ACCESS:
            return func(*args, **kwargs)
        if name in _READS:
            return self._on_full(func, args, kwargs)
        tensors, changed = _tensors(args, kwargs), _changed_tensors(name, args, kwargs)
        if len({_mesh(each) for each in tensors if not _is_supported_number(each, changed)}) > 1:
            return self._on_mixed(func, args, kwargs, changed)
        if changed is not None:
            return func(*args, **kwargs)
        if torch.is_grad_enabled():
            args, kwargs = tree_map_only(DTensor, _restoring_gradient_placements, (args, kwargs))
        try:
            result = func(*args, **kwargs)
        except RuntimeError:
            if name not in _VIEWS:
                raise
            return self._on_full(func, args, kwargs)
        if all(each.dim() == 0 for each in tensors):
            return result
        return tree_map_only(DTensor, self._without_partial_placements, result)

    def _on_mixed(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], changed: Any) -> Any:
        """Compute with plain tensors and DTensors, or with DTensors on several meshes."""
        name = getattr(func, "__name__", "")
        if name.startswith("_foreach_") and len(args[0]) > 1:
            return self._one_by_one(func, args, kwargs)
        targets = changed if isinstance(changed, (list, tuple)) else [changed]
        if len(targets) > 1 and any(isinstance(target, DTensor) for target in targets):
            raise ValueError(
                f"{name} would write {len(targets)} sharded tensors from plain and sharded ones, and only one is "
                "supported; compute out of place."
            )
        target = targets[0]
        if not isinstance(target, DTensor):
            return self._on_full(func, args, kwargs)
        to_placements = functools.partial(self._with_placements_of, name, target)
        return func(*tree_map_only(Tensor, to_placements, args), **tree_map_only(Tensor, to_placements, kwargs))

    def _one_by_one(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function of lists, such as torch._foreach_add_, separately for each index of the lists."""
        count = len(args[0])

        def at(idx: int, value: Any) -> Any:
            return [value[idx]] if isinstance(value, (list, tuple)) and len(value) == count else value

        results = []
        for idx in range(count):
            kwargs_of_one = {name: at(idx, value) for name, value in kwargs.items()}
            results.append(self._compute(func, tuple(at(idx, value) for value in args), kwargs_of_one))
        return None if results[0] is None else [result for [result] in results]

    def _on_full(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = tree_map_only(DTensor, self.full, (args, kwargs))
        return func(*args, **kwargs)

    def _with_placements_of(self, name: str, changed: DTensor, other: Tensor) -> Tensor:
        """Return `other`, sharded like `changed`, the DTensor that the function `name` changes in place.

        `changed` itself, numbers and other DTensors on its mesh are returned as they are.

        Raises:
            ValueError: `other` has another shape than `changed`, or requires a gradient.
        """
        if other is changed or other.dim() == 0 or _mesh(other) == changed.device_mesh:
            return other
        if other.requires_grad or other.shape != changed.shape:
            raise ValueError(
                f"{name} would change a sharded tensor {list(changed.shape)} by a tensor {list(other.shape)}"
                f"{' that requires a gradient' if other.requires_grad else ''}; pass a tensor of the same shape that "
                "requires no gradient (expand or detach it first), or compute out of place."
            )
        return shard_like(self.full(other) if isinstance(other, DTensor) else other, changed)

    def _without_partial_placements(self, result: DTensor) -> Tensor:
        """Return a result as later functions need it: a number in full, any other result without partial placements.

        In-place functions do not support partial DTensors; while gradients are recorded, results may stay partial.
        """
        if result.dim() == 0:
            return self.full(result)
        if torch.is_grad_enabled() or not _is_partial(result):
            return result
        return result.redistribute(placements=[Replicate() if p.is_partial() else p for p in result.placements])


def _is_partial(tensor: DTensor) -> bool:
    return any(placement.is_partial() for placement in tensor.placements)


def _is_supported_number(tensor: Tensor, changed: Any) -> bool:
    """Return whether a tensor is a plain number that DTensor operations support.

    A number whose gradient is recorded is supported only by functions that change tensors (`changed`, the result of
    `_changed_tensors`, is not None): from other functions, its gradient would be a DTensor.
    """
    if isinstance(tensor, DTensor) or tensor.dim() > 0:
        return False
    return changed is not None or not (tensor.requires_grad and torch.is_grad_enabled())


def _has_dtensor(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    for value in (*args, *kwargs.values()):
        if isinstance(value, DTensor):
            return True
        if isinstance(value, (list, tuple)) and any(isinstance(item, DTensor) for item in value):
            return True
    return False


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    flat: list[Tensor] = []
    for value in (*args, *kwargs.values()):
        items = value if isinstance(value, (list, tuple)) else (value,)
        flat += [item for item in items if isinstance(item, Tensor)]
    return flat


def _mesh(tensor: Tensor) -> DeviceMesh | None:
    return tensor.device_mesh if isinstance(tensor, DTensor) else None


def _changed_tensors(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the tensor, or the list of them, that a function changes in place or by `out`; None: it changes none."""
    if kwargs.get("out") is not None:
        return kwargs["out"]
    is_method = name.endswith("_") and not name.endswith("__")
    is_operator = name.startswith("__i") and name not in ("__invert__", "__int__", "__index__")
    return args[0] if args and (is_method or is_operator or name == "__setitem__") else None


def _restoring_gradient_placements(tensor: DTensor) -> DTensor:
    return _RestorePlacements.apply(tensor) if tensor.is_leaf and tensor.requires_grad else tensor
