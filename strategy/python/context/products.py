"""Rules of matrix products, embeddings, dropout, and weft's operators for one rank's features."""

from __future__ import annotations

import functools
import string
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.strategy.context.layout import Place
from weft.strategy.context.sharded_sequence import (
    GATHER,
    Rule,
    ShardedSequence,
    redistributed,
    rule,
    rules_by_name,
    shard,
    sum_over_ranks,
    wrap,
)


@rule(F.linear)
def _linear(func: Any, args: Any, kwargs: Any) -> Any:
    named = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
    x = named["input"]
    others = (named["weight"], named.get("bias"))
    if not isinstance(x, ShardedSequence) or any(isinstance(each, ShardedSequence) for each in others):
        return GATHER
    if x.place.dim == x.dim() - 1:
        return GATHER
    return wrap(F.linear(x.local, *others), x.place)


@rule(torch.addmm, Tensor.addmm)
def _addmm(func: Any, args: Any, kwargs: Any) -> Any:
    if len(args) != 3 or kwargs:
        return GATHER
    bias, x, weight = args
    sharded = [isinstance(each, ShardedSequence) for each in args]
    if sharded != [False, True, False] or x.place.dim != 0 or (bias.dim() > 1 and bias.shape[0] != 1):
        return GATHER
    return wrap(torch.addmm(bias, x.local, weight), x.place)


@rule(Tensor.matmul, torch.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.mm, Tensor.mm)
def _matmul(func: Any, args: Any, kwargs: Any) -> Any:
    if len(args) != 2 or kwargs:
        return GATHER
    return matmul(*args)


@rule(Tensor.__rmatmul__)
def _rmatmul(func: Any, args: Any, kwargs: Any) -> Any:
    return matmul(args[1], args[0])


def matmul(a: Tensor, b: Tensor) -> Any:
    """Return a @ b for tensors of two or more dims, with the tokens in the rows, the columns, the batch or the sum."""
    if a.dim() < 2 or b.dim() < 2:
        return GATHER
    if isinstance(a, ShardedSequence) and a.place.dim == a.dim() - 1:  # the tokens are summed
        rows = a.place.at(b.dim() - 2)
        if b.shape[-2] == rows.full_size and (not isinstance(b, ShardedSequence) or b.place == rows):
            return sum_over_ranks(a.local @ (b.local if isinstance(b, ShardedSequence) else shard(b, rows)), a.place)
        return GATHER
    if isinstance(a, ShardedSequence) and a.place.dim == a.dim() - 2:
        # The products of all pairs of tokens, as the scores of an attention: each rank computes its rows.
        other = b.full() if isinstance(b, ShardedSequence) else b
        ndim = max(a.dim(), b.dim())
        return wrap(a.local @ other, a.place.at(ndim - 2))
    if isinstance(b, ShardedSequence) and b.place.dim == b.dim() - 1 and not isinstance(a, ShardedSequence):
        return wrap(a @ b.local, b.place.at(max(a.dim(), b.dim()) - 1))
    return _batched(a, b)


def _batched(a: Tensor, b: Tensor) -> Any:
    """Return a @ b for tokens in one of the dims before the last two."""
    leader = a if isinstance(a, ShardedSequence) else b
    assert isinstance(leader, ShardedSequence)
    place, from_end = leader.place, leader.dim() - leader.place.dim
    if from_end < 3 or place.full_size == 1:
        return GATHER

    def own(each: Tensor) -> Tensor | None:
        at = place.at(each.dim() - from_end)
        if isinstance(each, ShardedSequence):
            return each.local if each.place == at else None
        if each.dim() < from_end or each.shape[at.dim] == 1:
            return each
        return shard(each, at) if each.shape[at.dim] == at.full_size else None

    left, right = own(a), own(b)
    return GATHER if left is None or right is None else wrap(left @ right, place.at(max(a.dim(), b.dim()) - from_end))


@rule(torch.einsum)
def _einsum(func: Any, args: Any, kwargs: Any) -> Any:
    """Compute an einsum whose sharded operands have the tokens under one label."""
    equation, operands = args[0], args[1:]
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = tuple(operands[0])
    if not isinstance(equation, str):
        return GATHER
    labels, output = _einsum_labels(equation, tuple(each.dim() for each in operands))
    if any(len(set(own)) < len(own) for own in labels):
        return GATHER
    leader = next(i for i, each in enumerate(operands) if isinstance(each, ShardedSequence))
    place, label = operands[leader].place, labels[leader][operands[leader].place.dim]
    shards = []
    for own, each in zip(labels, operands, strict=True):
        if label in own:
            if each.shape[own.index(label)] != place.full_size:
                return GATHER
            at = place.at(own.index(label))
            shards.append(redistributed(each, at) if isinstance(each, ShardedSequence) else shard(each, at))
        else:
            shards.append(each.full() if isinstance(each, ShardedSequence) else each)
    result = torch.einsum(",".join(labels) + "->" + output, *shards)
    return wrap(result, place.at(output.index(label))) if label in output else sum_over_ranks(result, place)


@functools.cache
def _einsum_labels(equation: str, num_dims: tuple[int, ...]) -> tuple[list[str], str]:
    """Return the labels of each operand and of the result, with labels in place of "..." and of an implied result."""
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    labels = inputs.split(",")
    unused = "".join(sorted(set(string.ascii_letters) - set(equation)))
    counts = [n - len(own) + 3 if "..." in own else 0 for n, own in zip(num_dims, labels, strict=True)]
    broadcast = unused[: max(counts)]
    labels = [own.replace("...", broadcast[len(broadcast) - num :]) for own, num in zip(labels, counts, strict=True)]
    if not arrow:
        used = "".join(inputs.replace("...", "").split(","))
        output = "..." * ("..." in inputs) + "".join(sorted(each for each in set(used) if used.count(each) == 1))
    return labels, output.replace("...", broadcast)


@rule(torch.baddbmm, Tensor.baddbmm)
def _baddbmm(func: Any, args: Any, kwargs: Any) -> Any:
    named = dict(zip(("input", "batch1", "batch2"), args, strict=False)) | kwargs
    if named.keys() - {"input", "batch1", "batch2", "beta", "alpha"}:
        return GATHER
    product = torch.bmm(named["batch1"], named["batch2"])
    alpha, beta = named.get("alpha", 1), named.get("beta", 1)
    product = product if alpha == 1 else product * alpha
    return product if beta == 0 else torch.add(product, named["input"], alpha=beta)


# ---- embeddings and operators ------------------------------------------------------------------------------


@rule(F.embedding, torch.embedding)
def _embedding(func: Any, args: Any, kwargs: Any) -> Any:
    names = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    named = dict(zip(names, args, strict=False)) | kwargs
    ids = named.get("input")
    if func is not F.embedding or not isinstance(ids, ShardedSequence) or named.get("max_norm") is not None:
        return GATHER
    if named.get("scale_grad_by_freq"):
        return GATHER  # the gradient depends on all ids
    return wrap(F.embedding(**{**named, "input": ids.local}), ids.place)


_PER_TOKEN = {"column_linear", "row_linear", "vocab_parallel_embedding", "copy_to_group", "reduce_from_group"}
_ALONG_ONE_DIM = {"gather_from_group", "gather_from_sequence", "scatter_to_group"}


@rules_by_name
def _find_operator(name: str) -> Rule | None:
    if name in _PER_TOKEN:
        return _per_token
    if name == "column_row_mlp":
        return _column_row_mlp
    return _along_one_dim if name in _ALONG_ONE_DIM else None


def _per_token(func: Any, args: Any, kwargs: Any) -> Any:
    """Call an operator that keeps the dims of its first argument before the last one."""
    x = args[0]
    if not isinstance(x, ShardedSequence) or any(isinstance(each, ShardedSequence) for each in args[1:]):
        return GATHER
    return wrap(func(x.local, *args[1:], **kwargs), x.place)


def _column_row_mlp(func: Any, args: Any, kwargs: Any) -> Any:
    if kwargs.get("sequence_dim") is not None:
        raise ValueError(
            "weft::column_row_mlp got a sequence that is sharded over context-parallel ranks and sequence_dim, which "
            "shards it over tensor-parallel ranks, too; leave sequence parallelism out."
        )
    return _per_token(func, args, kwargs)


def _along_one_dim(func: Any, args: Any, kwargs: Any) -> Any:
    x, dim = args[0], args[1] if len(args) > 1 else kwargs["dim"]
    if not isinstance(x, ShardedSequence) or dim % x.dim() == x.place.dim:
        return GATHER
    return wrap(func(x.local, *args[1:], **kwargs), x.place)


# ---- dropout -----------------------------------------------------------------------------------------------


@rule(F.dropout, torch.dropout)
def _dropout(func: Any, args: Any, kwargs: Any) -> Any:
    """Drop the elements that weft.nn.Dropout drops on one device: a rank's mask follows from its tokens' positions.

    All ranks draw the same seed, as their random states are equal.
    """
    named = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | kwargs
    x, p, trains = named["input"], named.get("p", 0.5), named.get("training", named.get("train", True))
    if not trains or p == 0.0:
        return x
    seed = torch.randint(0, 1 << 62, (), dtype=torch.int64, device=torch.device("cpu"))
    dropped = drop(x.local, x.place, p, int(seed))
    if not named.get("inplace"):
        return wrap(dropped, x.place)
    x.local.copy_(dropped)
    return x


def drop(local: Tensor, place: Place, p: float, seed: int) -> Tensor:
    """Return this rank's shard of weft::dropout of the full tensor with this seed; saves one byte for each element."""
    if p == 1.0:
        return local * 0.0
    return local * _kept(local, place, p, seed) * (1 / (1 - p))


@torch.no_grad()
def _kept(local: Tensor, place: Place, p: float, seed: int) -> Tensor:
    layout, dim = place.layout, place.dim
    outer = local.shape[:dim].numel() * place.outer
    inner = place.inner * local.shape[dim + 1 :].numel()
    masks = []
    for start, stop in layout.own:
        ones = torch.ones((outer, stop - start, inner), dtype=local.dtype, device=local.device)
        masks.append(torch.ops.weft._dropout_of_shard(ones, seed, p, inner, stop - start, start, layout.size) > 0)
    if not masks:
        return torch.ones_like(local, dtype=torch.bool)
    return torch.cat(masks, 1).reshape(local.shape)
