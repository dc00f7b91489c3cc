"""Rules of functions that compute each element of the broadcast tensors alone, and of metadata."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from weft.strategy.context.layout import Place
from weft.strategy.context.sharded_sequence import (
    GATHER,
    Rule,
    ShardedSequence,
    follow_shard,
    redistributed,
    rule,
    rules_by_name,
    shard,
    wrap,
)

_OPERATORS = {
    "truediv": "div",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    "invert": "bitwise_not",
    "pos": "positive",
    "lshift": "bitwise_left_shift",
    "rshift": "bitwise_right_shift",
}
# Elementwise functions without that tag, or without an operator of their name.
_ELEMENTWISE = {"type", "clone", "contiguous", "detach", "alias", "cpu", "cuda", "masked_fill"}
_ELEMENTWISE |= {"float", "double", "half", "bfloat16", "int", "long", "short", "bool", "char", "byte", "softsign"}
_ELEMENTWISE |= {"zeros_like", "ones_like", "full_like", "empty_like", "nan_to_num", "relu6"}
_ELEMENTWISE |= {
    "hardswish",
    "hardsigmoid",
    "celu",
    "selu",
    "logsigmoid",
    "swish",
    "rsub",
    "copy",
    "tanhshrink",
    "fill",
    "zero",
    "complex",
    "polar",
    "conj",
    "resolve_conj",
    "resolve_neg",
    "log_sigmoid",
    "float_power",
}
_ELEMENTWISE |= {"subtract", "multiply", "divide", "negative", "absolute", "greater", "greater_equal", "less"}
_ELEMENTWISE |= {"less_equal", "not_equal", "isclose"}

_METADATA = {
    *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.__len__, Tensor.element_size),
    *(Tensor.is_floating_point, Tensor.is_complex, Tensor.is_contiguous, Tensor.stride, Tensor.get_device),
    *(Tensor.is_inference, Tensor.__hash__, Tensor.storage_offset, torch.is_floating_point, torch.is_complex),
    *(torch.numel, Tensor.is_signed),
}
for _name in (
    *("shape", "dtype", "device", "layout", "ndim", "is_cuda", "is_cpu", "is_sparse", "is_nested", "itemsize"),
    *("is_meta", "is_quantized", "is_mps", "is_xla", "nbytes", "is_mkldnn"),
):
    _METADATA.add(getattr(Tensor, _name).__get__)


@rule(*_METADATA)
def _metadata(func: Any, args: Any, kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


_OF_GRAPH = [
    getattr(Tensor, name).__get__ for name in ("requires_grad", "grad_fn", "is_leaf", "_version", "grad", "_base")
]


@rule(*_OF_GRAPH, Tensor.is_shared, Tensor.new_zeros, Tensor.new_ones, Tensor.new_full, Tensor.new_empty)
@rule(Tensor.new_tensor, torch.result_type)
def _of_shard(func: Any, args: Any, kwargs: Any) -> Any:
    """Answer for the shard: what is true for it, and new tensors of given shapes, which are plain."""
    args, kwargs = tree_map_only(ShardedSequence, lambda each: each.local, (args, kwargs))
    return func(*args, **kwargs)


@rule(Tensor.to, Tensor.type_as)
def _converted(func: Any, args: Any, kwargs: Any) -> Any:
    """Convert to a type or device, which another tensor may give, whatever its shape is."""
    x = args[0]
    args, kwargs = tree_map_only(ShardedSequence, lambda each: each.local, (args, kwargs))
    result = func(*args, **kwargs)
    return wrap(result, x.place) if isinstance(x, ShardedSequence) else result


@rule(Tensor.requires_grad_, Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
def _set_requires_grad(func: Any, args: Any, kwargs: Any) -> Any:
    func(args[0].local, *args[1:], **kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        func(*args, **kwargs)
    return args[0]


@rule(Tensor.real.__get__, Tensor.imag.__get__)  # type: ignore[attr-defined]
def _part(func: Any, args: Any, kwargs: Any) -> Any:
    return wrap(func(args[0].local), args[0].place)


@rule(torch.where, Tensor.where)
def _where(func: Any, args: Any, kwargs: Any) -> Any:
    return GATHER if len(args) + len(kwargs) == 1 else elementwise(func, args, kwargs)  # the positions that are true


@rule(Tensor.register_hook, Tensor.retain_grad)
def _hook(func: Any, args: Any, kwargs: Any) -> Any:
    """Register a hook of the shard's gradient."""
    return func(args[0].local, *args[1:], **kwargs)


@rule(Tensor.data.__get__)  # type: ignore[attr-defined]
def _data(func: Any, args: Any, kwargs: Any) -> Any:
    return wrap(args[0].local.data, args[0].place)


@rules_by_name
def _find(name: str) -> Rule | None:
    is_dunder = name.startswith("__") and name.endswith("__")
    base = name.strip("_")
    if is_dunder:
        if base[:1] in "ri" and (base[1:] in _OPERATORS or _is_elementwise(base[1:])):
            in_place, base = base[0] == "i", base[1:]
            return in_place_rule if in_place else elementwise
        return elementwise if base in _OPERATORS or _is_elementwise(base) else None
    if not _is_elementwise(base):
        return None
    return in_place_rule if name.endswith("_") else elementwise


@functools.cache
def _is_elementwise(name: str) -> bool:
    packet = getattr(torch.ops.aten, name, None)
    if name in _ELEMENTWISE:
        return True
    if packet is None or name in ("lerp_", "bernoulli", "dropout", "native_dropout"):
        return False
    return any(torch.Tag.pointwise in getattr(packet, each).tags for each in packet.overloads())


def elementwise(func: Any, args: Any, kwargs: Any) -> Any:
    """Compute with the shards, and with this rank's part of the full tensors among the arguments."""
    if not kwargs and (leader := _only_sequences(args)) is not None:
        result = func(*[each.local if type(each) is ShardedSequence else each for each in args])
        return wrap(result, leader.place)
    if kwargs.get("out") is not None:
        return GATHER
    if kwargs.get("inplace") is True:
        return in_place_rule(func, args, kwargs)
    aligned = align(args, kwargs)
    if aligned is None:
        return GATHER
    args, kwargs, place_in = aligned
    result = func(*args, **kwargs)
    return result if not isinstance(result, (Tensor, tuple)) else _wrap_aligned(result, place_in)


def _only_sequences(args: Any) -> ShardedSequence | None:
    """Return the first tensor if all tensors are sequences with the same place and number of dims."""
    leader: ShardedSequence | None = None
    for each in args:
        if type(each) is ShardedSequence:
            if leader is None:
                leader = each
            elif each.place is not leader.place or each._local.dim() != leader._local.dim():
                return None
        elif isinstance(each, (Tensor, list, tuple)):
            return None
    return leader


def in_place_rule(func: Any, args: Any, kwargs: Any) -> Any:
    """Change the shard of the first argument in place."""
    changed = args[0]
    if not isinstance(changed, ShardedSequence):
        return GATHER
    aligned = align(args, kwargs, like=changed)
    if aligned is None:
        return GATHER
    args, kwargs, _ = aligned
    func(*args, **kwargs)
    follow_shard(changed)
    return changed


@rule(F.relu, F.silu, F.gelu, F.leaky_relu, F.elu, F.hardtanh, F.mish, F.softplus, F.tanh, F.sigmoid, F.relu6)
def _activation(func: Any, args: Any, kwargs: Any) -> Any:
    return elementwise(func, args, kwargs)


def _wrap_aligned(result: Any, place_in: Any) -> Any:
    if isinstance(result, tuple):
        return type(result)([_wrap_aligned(each, place_in) for each in result])
    return ShardedSequence(result, place_in(result))


def align(args: Any, kwargs: Any, like: ShardedSequence | None = None) -> tuple[Any, Any, Any] | None:
    """Return the arguments with the shards of tensors that broadcast with each other, and the place in the result.

    The place is a function of the result. None: the tensors do not fit each other.

    Args:
        like: the tensor whose layout is used; None: that of the first sharded tensor.
    """
    tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
    sharded = [each for each in tensors if isinstance(each, ShardedSequence)]
    if not sharded:
        return None  # inside of a list
    leader = like if like is not None else sharded[0]
    place, from_end = leader.place, leader.dim() - leader.place.dim

    def fits(each: Tensor) -> bool:
        return each.dim() < from_end or each.shape[each.dim() - from_end] in (1, place.full_size)

    if not all(fits(each) for each in tensors) or (place.full_size == 1 and len(tensors) > 1):
        return None

    def convert(each: Tensor) -> Tensor:
        if isinstance(each, ShardedSequence):
            if each.dim() >= from_end and each.shape[each.dim() - from_end] == place.full_size:
                return redistributed(each, place.at(each.dim() - from_end))
            each = each.full()
        if each.dim() < from_end or each.shape[each.dim() - from_end] == 1:
            return each
        return shard(each, place.at(each.dim() - from_end))

    args = tuple(convert(each) if isinstance(each, Tensor) else each for each in args)
    kwargs = {name: convert(each) if isinstance(each, Tensor) else each for name, each in kwargs.items()}
    return args, kwargs, lambda result: place.at(result.dim() - from_end)


def aligned_to(x: ShardedSequence, other: Tensor, place: Place) -> Tensor:
    """Return this rank's shard, at `place`, of a tensor that belongs to x, such as its targets."""
    return redistributed(other, place) if isinstance(other, ShardedSequence) else shard(other, place)
