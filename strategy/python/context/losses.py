"""Rules of losses: each rank computes those of its tokens, and the ranks add them up."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.strategy.context.elementwise import aligned_to, elementwise
from weft.strategy.context.layout import Place
from weft.strategy.context.sharded_sequence import (
    GATHER,
    Rule,
    ShardedSequence,
    rule,
    rules_by_name,
    sum_over_ranks,
    wrap,
)

_OF_CLASSES = {
    F.cross_entropy: ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction"),
    F.nll_loss: ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction"),
}


@rule(*_OF_CLASSES)
def _loss_of_classes(func: Any, args: Any, kwargs: Any) -> Any:
    names = (*_OF_CLASSES[func], "label_smoothing")
    named = dict(zip(names, args, strict=False)) | kwargs
    x, target = named.pop("input"), named.pop("target")
    class_dim = 1
    if not isinstance(x, ShardedSequence) or x.num_dims == 1 or x.place.dim == class_dim:
        return GATHER
    if named.get("size_average") is not None or named.get("reduce") is not None:
        return GATHER
    has_classes = target.dim() == x.num_dims - 1
    place = x.place.at(x.place.dim - (x.place.dim > class_dim)) if has_classes else x.place
    if target.shape[place.dim] != place.full_size:
        return GATHER
    own_target = aligned_to(x, target, place)
    reduction = named.pop("reduction", "mean")
    if reduction == "none":
        losses = func(x.local, own_target, **named, reduction="none")
        return wrap(losses, x.place.at(x.place.dim - (x.place.dim > class_dim)))
    if x.dtype in (torch.float16, torch.bfloat16):
        losses = func(x.local, own_target, **named, reduction="none")
        dtype, own_total = losses.dtype, losses.sum(dtype=torch.float32)  # a sum of float16 may overflow
    else:
        own_total = func(x.local, own_target, **named, reduction="sum")
        dtype = own_total.dtype
    total = sum_over_ranks(own_total, place)
    if reduction == "mean" and has_classes:
        ignored, weight = named.get("ignore_index", -100), named.get("weight")
        total = total / _divisor(target, own_target, place, ignored, weight, total.dtype)
    elif reduction == "mean":
        total = total / (x.numel() // x.shape[class_dim])
    return total.to(dtype)


def _divisor(
    target: Tensor, own_target: Tensor, place: Place, ignored: int, weight: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return the number, or the sum of the weights, of the targets that are not ignored, for all tokens."""
    is_sharded = isinstance(target, ShardedSequence)
    counted = own_target if is_sharded else target
    kept = counted != ignored
    values = kept if weight is None else weight.detach()[counted.where(kept, 0)] * kept
    count = values.sum(dtype=torch.int64 if weight is None else dtype)
    return sum_over_ranks(count, place) if is_sharded else count


_ELEMENTWISE: tuple[Any, ...] = (
    *(F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.kl_div, F.poisson_nll_loss),
    *(F.binary_cross_entropy, F.binary_cross_entropy_with_logits),
)

_WEIGHTED_SUMS = (F.binary_cross_entropy, F.binary_cross_entropy_with_logits)


@rule(*_ELEMENTWISE)
def _elementwise_loss(func: Any, args: Any, kwargs: Any) -> Any:
    if len(args) > 2 or kwargs.get("size_average") is not None or kwargs.get("reduce") is not None:
        return GATHER
    if kwargs.get("weight") is not None and func not in _WEIGHTED_SUMS:
        return GATHER  # the mean is that of the weights
    options = {name: each for name, each in kwargs.items() if name not in ("reduction", "input", "target")}
    inputs = [*args, *(kwargs[name] for name in ("input", "target")[len(args) :])]
    losses = elementwise(func, tuple(inputs), {**options, "reduction": "none"})
    if losses is GATHER or not isinstance(losses, ShardedSequence):
        return GATHER
    reduction = kwargs.get("reduction", "mean")
    if reduction == "batchmean":
        return losses.sum() / inputs[0].shape[0]
    return losses if reduction == "none" else losses.mean() if reduction == "mean" else losses.sum()


# ---- weft's operators of a vocabulary that is sharded over tensor-parallel ranks -----------------------------


@rules_by_name
def _find(name: str) -> Rule | None:
    return _vocab_loss if name in ("vocab_parallel_cross_entropy", "vocab_parallel_linear_cross_entropy") else None


def _vocab_loss(func: Any, args: Any, kwargs: Any) -> Any:
    has_weight = func.__name__ == "vocab_parallel_linear_cross_entropy"
    x, target = args[0], args[2 if has_weight else 1]
    if not isinstance(x, ShardedSequence):
        return GATHER
    own_target = aligned_to(x, target, x.place)
    options = {**kwargs, "reduction": "none"}
    arguments = (x.local, args[1], own_target, *args[3:]) if has_weight else (x.local, own_target, *args[2:])
    losses = func(*arguments, **options)
    reduction = kwargs.get("reduction", "mean")
    if reduction == "none":
        return wrap(losses, x.place)
    total = sum_over_ranks(losses.sum(), x.place)
    if reduction == "sum":
        return total
    return total / _divisor(target, own_target, x.place, kwargs.get("ignore_index", -100), None, total.dtype)
