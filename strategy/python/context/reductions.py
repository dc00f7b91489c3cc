"""Rules of reductions, and of functions along one dim."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.strategy.context.elementwise import elementwise
from weft.strategy.context.sharded_sequence import GATHER, ShardedSequence, rule, sum_over_ranks, wrap
from weft.strategy.context.views import positive

_REDUCTIONS = ("sum", "mean", "prod", "amax", "amin", "logsumexp", "var", "std", "norm", "all", "any", "nansum")
_REDUCTIONS_BY_NORM = (torch.linalg.norm, torch.linalg.vector_norm)
# The arguments by position; of the other functions: dim, keepdim.
_ARGUMENTS = {
    "norm": ("p", "dim", "keepdim"),
    "linalg_norm": ("ord", "dim", "keepdim"),
    "linalg_vector_norm": ("ord", "dim", "keepdim"),
    "var": ("dim", "unbiased", "keepdim"),
    "std": ("dim", "unbiased", "keepdim"),
}


def _named(name: str, args: Any, kwargs: Any) -> dict[str, Any]:
    named: dict[str, Any] = dict(zip(_ARGUMENTS.get(name, ("dim", "keepdim")), args[1:], strict=False)) | kwargs
    return named


@rule(*(getattr(Tensor, name) for name in _REDUCTIONS), *(getattr(torch, name) for name in _REDUCTIONS))
@rule(*_REDUCTIONS_BY_NORM)
def _reduce(func: Any, args: Any, kwargs: Any) -> Any:
    x, named = args[0], _named(func.__name__, args, kwargs)
    dims = named.get("dim")
    keeps, place = bool(named.get("keepdim", False)), x.place
    if isinstance(dims, bool):  # the argument `unbiased` of var and std
        return GATHER
    given = (
        tuple(range(x.num_dims))
        if dims is None or dims in ((), [])
        else dims
        if isinstance(dims, (tuple, list))
        else (dims,)
    )
    reduced = {positive(each, x.num_dims) for each in given}
    if named.get("out") is not None:
        return GATHER
    if place.dim not in reduced:
        moved = place if keeps else place.at(place.dim - sum(each < place.dim for each in reduced))
        return wrap(func(x.local, *args[1:], **kwargs), moved)
    if func.__name__ not in ("sum", "mean"):
        return GATHER
    dtype = wide = named.get("dtype")
    if (dtype or x.dtype) in (torch.float16, torch.bfloat16):  # the sum of a mean may overflow float16
        dtype, wide = dtype or func(x.local.new_empty(())).dtype, torch.float32
    options = {} if wide is None else {"dtype": wide}
    partial = x.local.sum(dim=sorted(reduced), keepdim=keeps, **options)
    if func.__name__ == "mean":
        count = 1
        for each in reduced:
            count *= x.shape[each]
        partial = partial / count
    total = sum_over_ranks(partial, place)
    return total if dtype is None else total.to(dtype)


_WITH_INDICES = ("max", "min", "median", "mode", "argmax", "argmin", "kthvalue")


@rule(*(getattr(Tensor, name) for name in _WITH_INDICES), *(getattr(torch, name) for name in _WITH_INDICES))
def _reduce_with_indices(func: Any, args: Any, kwargs: Any) -> Any:
    x, name = args[0], func.__name__
    if (len(args) > 1 and isinstance(args[1], Tensor)) or isinstance(kwargs.get("other"), Tensor):
        return elementwise(func, args, kwargs)
    names = ("k", "dim", "keepdim") if name == "kthvalue" else ("dim", "keepdim")
    named = dict(zip(names, args[1:], strict=False)) | kwargs
    dim = -1 if name in ("kthvalue", "mode") and "dim" not in named else named.get("dim")
    if not isinstance(dim, int) or positive(dim, x.num_dims) == x.place.dim:
        return GATHER
    drops = not named.get("keepdim", False) and positive(dim, x.num_dims) < x.place.dim
    return wrap(func(x.local, *args[1:], **kwargs), x.place.at(x.place.dim - drops))


# The position of the argument dim, and its default (None: it must be given).
_ALONG_DIM = {
    "softmax": (1, None),
    "log_softmax": (1, None),
    "softmin": (1, None),
    "cumsum": (1, None),
    "cumprod": (1, None),
    "logcumsumexp": (1, None),
    "sort": (1, -1),
    "argsort": (1, -1),
    "topk": (2, -1),
    "glu": (1, -1),
    "normalize": (2, 1),
    "flip": (1, None),
    "roll": (2, None),
    "diff": (2, -1),
}


def _functions_along_dim() -> list[Any]:
    owners: tuple[Any, ...] = (Tensor, torch, F)
    found = [getattr(owner, name, None) for name in _ALONG_DIM for owner in owners]
    return [each for each in found if each is not None]


@rule(*_functions_along_dim())
def _along_dim(func: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    if not isinstance(x, ShardedSequence) or any(isinstance(each, Tensor) for each in (*args[1:], *kwargs.values())):
        return GATHER
    position, default = _ALONG_DIM[func.__name__]
    given = args[position] if len(args) > position else kwargs.get("dim", kwargs.get("dims", default))
    if func.__name__ == "flip" and len(args) > 2:
        given = args[1:]
    dims = given if isinstance(given, (tuple, list)) else (given,)
    if (
        not all(type(each) is int and positive(each, x.num_dims) != x.place.dim for each in dims)
        or kwargs.get("out") is not None
    ):
        return GATHER
    return wrap(func(x.local, *args[1:], **kwargs), x.place)


@rule(F.layer_norm, torch.layer_norm, F.rms_norm, torch.rms_norm)
def _norm_of_features(func: Any, args: Any, kwargs: Any) -> Any:
    named = dict(zip(("input", "normalized_shape"), args, strict=False)) | kwargs
    x, shape = named["input"], named["normalized_shape"]
    num_dims = len(shape) if isinstance(shape, (tuple, list)) else 1
    if not isinstance(x, ShardedSequence) or x.place.dim >= x.num_dims - num_dims:
        return GATHER
    if args:
        args = (x.local, *args[1:])
    else:
        kwargs = {**kwargs, "input": x.local}
    return wrap(func(*args, **kwargs), x.place)


@rule(F.pad, torch.constant_pad_nd)
def _pad(func: Any, args: Any, kwargs: Any) -> Any:
    x, padding = args[0], args[1] if len(args) > 1 else kwargs["pad"]
    is_constant = kwargs.get("mode", args[2] if len(args) > 2 else "constant") == "constant"
    if func is F.pad and not is_constant and 0 in x.place.layout.lengths:
        return GATHER  # torch reflects no empty tensor
    if x.num_dims - len(padding) // 2 <= x.place.dim:
        first = 2 * (x.num_dims - 1 - x.place.dim)
        if tuple(padding[first : first + 2]) != (0, 0) or (func is F.pad and not is_constant):
            return GATHER
    return wrap(func(x.local, *args[1:], **kwargs), x.place)


@rule(Tensor.tril, torch.tril, Tensor.triu, torch.triu)
def _triangle(func: Any, args: Any, kwargs: Any) -> Any:
    return (
        GATHER
        if args[0].place.dim >= args[0].dim() - 2
        else wrap(func(args[0].local, *args[1:], **kwargs), args[0].place)
    )
