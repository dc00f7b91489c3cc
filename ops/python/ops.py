"""Typed calls of weft's operators (`torch.ops.weft.*`), for eager code, torch.compile and torch.export.

All weights are this rank's shards in nn.Linear's layout `[out, in]`; `group_name` is c10d's name of a
process group (`mesh.get_group("tensor_parallel").group_name`), "" is a group of one. Tensors of a call
share one dtype (float32, float64, bfloat16, float16) and device; under torch.autocast they are cast as
for nn.Linear. Every refusal is a ValueError, TypeError or IndexError before anything is sent. There are no second
derivatives.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
Reduction = Literal["none", "mean", "sum"]


def column_row_mlp(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor | None = None,
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    b3: Tensor | None = None,
    *,
    activation: Activation,
    group_name: str,
    recompute: bool = False,
    sequence_dim: int | None = None,
    sequence_size: int | None = None,
) -> Tensor:
    """act(x w1ᵀ + b1) [* (x w3ᵀ + b3)] w2ᵀ, summed over the group, + b2.

    Shapes: x `[..., d]`, w1 and w3 `[f, d]`, b1 and b3 `[f]`, w2 `[o, f]`, b2 `[o]` (whole on every
    rank, added once) -> `[..., o]`, with f this rank's part of the hidden dim, uneven or empty.
    One all-reduce forward, one backward (none when x needs no gradient). Saves x, x w1ᵀ and x w3ᵀ; with
    `recompute` x alone.

    Sequence parallelism: with `sequence_dim`, any dim but the last, x and the result are torch.chunk's parts along it
    of `sequence_size` entries; without `sequence_size` every rank must bring as much as the others. Then x is
    gathered and the result reduce-scattered forward; backward the result's gradient and x, of which its part alone
    was saved, are gathered and x's gradient is reduce-scattered.
    """
    return torch.ops.weft.column_row_mlp(
        x,
        w1,
        w2,
        w3,
        b1,
        b2,
        b3,
        activation=activation,
        group_name=group_name,
        recompute=recompute,
        sequence_dim=sequence_dim,
        sequence_size=sequence_size,
    )


def column_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, group_name: str) -> Tensor:
    """x weightᵀ + bias with the rows of weight sharded: `[..., d]` -> `[..., f]`; one all-reduce backward."""
    return torch.ops.weft.column_linear(x, weight, bias, group_name=group_name)


def row_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, group_name: str) -> Tensor:
    """x weightᵀ summed over the group + bias: `[..., f]` -> `[..., o]`; bias whole on every rank.

    One all-reduce forward, none backward.
    """
    return torch.ops.weft.row_linear(x, weight, bias, group_name=group_name)


def all_gather_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    gather_dim: int,
    group_name: str,
    dim_size: int | None = None,
) -> Tensor:
    """gather(x) weightᵀ + bias with x cut along `gather_dim`: `[..., s, ..., d]` -> `[..., S, ..., f]`.

    x holds torch.chunk's part of `dim_size` entries along `gather_dim`, any dim but the last; without `dim_size`
    every rank must bring as much as the others. weight `[f, d]`, bias `[f]`. One all-gather forward; backward one
    all-gather, of x again, which is all that is saved of it, and one reduce-scatter, of x's gradient; or one of each
    for every piece: see `weft.overlap`.
    """
    return torch.ops.weft.all_gather_linear(
        x, weight, bias, gather_dim=gather_dim, group_name=group_name, dim_size=dim_size
    )


def linear_reduce_scatter(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, scatter_dim: int, group_name: str
) -> Tensor:
    """This rank's part along `scatter_dim` of x weightᵀ summed over the group, + bias.

    Shapes: x `[..., S, ..., f]`, weight `[o, f]`, bias `[o]` (whole on every rank, added once) -> `[..., s, ..., o]`,
    s being torch.chunk's part of S; `scatter_dim` is any dim but the last. One reduce-scatter forward, one
    all-gather backward; or one for every piece: see `weft.overlap`.
    """
    return torch.ops.weft.linear_reduce_scatter(x, weight, bias, scatter_dim=scatter_dim, group_name=group_name)


def sharded_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, group_name: str, out_features: int | None = None
) -> Tensor:
    """x weightᵀ + bias with each rank's own x and a weight that no rank has whole: `[..., d]` -> `[..., out]`.

    weight `[v, d]` and bias `[v]` are torch.chunk's part of `out_features` rows; without it every rank must hold as
    many as the others. Shard by shard the weight is broadcast, multiplied and dropped: two shards at a time are there
    beside this rank's own. Gradients of weight and bias are summed over the group. A broadcast for each shard
    forward; a broadcast and a reduce for each backward; with a bias one all-gather and one reduce-scatter of it.
    """
    return torch.ops.weft.sharded_linear(x, weight, bias, group_name=group_name, out_features=out_features)


def vocab_parallel_embedding(
    input: Tensor, weight: Tensor, vocab_start: int, *, group_name: str, vocab_size: int | None = None
) -> Tensor:
    """Rows of a table whose rows are sharded: ids `[...]` (int64, int32; global) -> `[..., d]`.

    weight `[v, d]` holds the rows from vocab_start on. One all-reduce forward. With `vocab_size`, CPU
    ids outside `[0, vocab_size)` are refused (IndexError); without it they give zeros.
    """
    return torch.ops.weft.vocab_parallel_embedding(
        input, weight, vocab_start, group_name=group_name, vocab_size=vocab_size
    )


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    vocab_start: int,
    *,
    group_name: str,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
) -> Tensor:
    """F.cross_entropy with classes cut over the group: logits `[..., v]` of the classes from vocab_start on.

    target `[...]` (int64, int32; global) -> a loss, `[]` or `[...]`, in float32 (float64 for float64 logits).
    `vocab_size` counts the classes of all ranks (without it every rank must have as many); with it CPU targets outside
    of it are refused (IndexError). One all-gather of four numbers a token forward, none backward. The logits and two
    numbers a token are saved; the gradient of the logits is the one tensor of their size that is made.
    """
    return torch.ops.weft.vocab_parallel_cross_entropy(
        logits,
        target,
        vocab_start,
        group_name=group_name,
        vocab_size=vocab_size,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,
    )


def vocab_parallel_linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    vocab_start: int,
    *,
    group_name: str,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
) -> Tensor:
    """vocab_parallel_cross_entropy of the logits x weightᵀ, which exist for a chunk of tokens at a time alone.

    x `[..., d]`, weight `[v, d]`, this rank's rows of the output matrix. One all-gather of four numbers a token
    forward, one all-reduce of x's gradient backward, which computes the logits again. x and two numbers a token
    are saved.
    """
    return torch.ops.weft.vocab_parallel_linear_cross_entropy(
        x,
        weight,
        target,
        vocab_start,
        group_name=group_name,
        vocab_size=vocab_size,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,
    )


def rms_norm(x: Tensor, weight: Tensor | None = None, *, group_name: str, eps: float = 1e-6) -> Tensor:
    """The RMS norm of x over its last dim, times weight: `[..., d]` -> `[..., d]`; weight `[d]`.

    `group_name` is the group that the tokens of x are cut over: weight, whole on every rank, gets the gradients of
    all of them, in one all-reduce backward. "" where every rank has all tokens: nothing is sent then. Half types are
    computed in float32, and take a weight of their own dtype or of float32. x and one number a token are saved.
    """
    return torch.ops.weft.rms_norm(x, weight, group_name=group_name, eps=eps)


def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, group_name: str, eps: float = 1e-5
) -> Tensor:
    """The layer norm of x over its last dim, times weight, plus bias; else like `rms_norm`.

    The gradients of weight and bias are summed together, in one all-reduce. Two numbers a token are saved.
    """
    return torch.ops.weft.layer_norm(x, weight, bias, group_name=group_name, eps=eps)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, *, group_name: str, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual) in one pass over memory: what a block adds and the next one norms.

    The sum, in the dtype of x and residual, is what is saved. Under autocast both are brought to the wider of their
    dtypes.
    """
    return torch.ops.weft.add_rms_norm(x, residual, weight, group_name=group_name, eps=eps)


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    group_name: str,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """(layer_norm(x + residual), x + residual); like `add_rms_norm`."""
    return torch.ops.weft.add_layer_norm(x, residual, weight, bias, group_name=group_name, eps=eps)


def dropout(
    x: Tensor, seed: Tensor, *, p: float, group_name: str, dim: int | None = None, dim_size: int | None = None
) -> Tensor:
    """x / (1 - p), or 0 with probability p, as nn.Dropout; what is dropped depends on seed and place alone.

    Without `dim` x is whole on every rank; with it x is this rank's part along `dim`, of `dim_size` together (as if all
    ranks had as much where that is not told). Ranks that pass the same seed, one int64 on the CPU, then drop what an
    unsharded call drops, on any device. Traced beside an x on a GPU, the seed must have no dims. The mask is made
    again in the backward; nothing is sent.
    """
    return torch.ops.weft.dropout(x, seed, p=p, group_name=group_name, dim=dim, dim_size=dim_size)


def copy_to_group(x: Tensor, group_name: str) -> Tensor:
    """Identity forward, all-reduce of the gradient backward: where a replicated tensor meets shards."""
    return torch.ops.weft.copy_to_group(x, group_name)


def reduce_from_group(x: Tensor, group_name: str) -> Tensor:
    """All-reduce (sum) forward, identity backward: where partial results become whole."""
    return torch.ops.weft.reduce_from_group(x, group_name)


def scatter_to_group(x: Tensor, dim: int, group_name: str) -> Tensor:
    """This rank's part of x along `dim`; all parts of the gradient are gathered.

    Parts here and below are those of torch.chunk: `ceil(size / ranks)` long, later ones shorter or empty.
    """
    return torch.ops.weft.scatter_to_group(x, dim, group_name)


def gather_from_group(x: Tensor, dim: int, group_name: str, *, dim_size: int | None = None) -> Tensor:
    """All parts along `dim`, of which x is this rank's; each rank keeps its part of the gradient.

    For a result that all ranks use alike: its gradient is taken to be equal on all of them. `dim_size` is the
    size of all parts together; without it every rank must bring as much as the others.
    """
    return torch.ops.weft.gather_from_group(x, dim, group_name, dim_size=dim_size)


def gather_from_sequence(x: Tensor, dim: int, group_name: str, *, dim_size: int | None = None) -> Tensor:
    """All parts along `dim`, of which x is this rank's; the gradients of all ranks are summed and scattered.

    For a result that each rank uses for something else, as before a column linear in sequence parallelism.
    `dim_size` as in `gather_from_group`.
    """
    return torch.ops.weft.gather_from_sequence(x, dim, group_name, dim_size=dim_size)


def reduce_scatter_to_sequence(x: Tensor, dim: int, group_name: str) -> Tensor:
    """This rank's part along `dim` of x summed over the group; all parts of the gradient are gathered."""
    return torch.ops.weft.reduce_scatter_to_sequence(x, dim, group_name)


def all_to_all(x: Tensor, split_dim: int, cat_dim: int, group_name: str, *, cat_size: int | None = None) -> Tensor:
    """Exchanges the dim that is cut: x is whole along `split_dim` and cut along `cat_dim`, the result the other way.

    Part r of x along `split_dim` goes to rank r. `cat_size` is the size of all parts along `cat_dim`; without it every
    rank must bring as much as the others. The gradient takes the way back.
    """
    return torch.ops.weft.all_to_all(x, split_dim, cat_dim, group_name, cat_size=cat_size)


def pipeline_send(tensors: list[Tensor], peer: int, channel: int, group_name: str) -> Tensor:
    """Sends tensors to rank `peer` of the group on a channel, 0 to 1022; gives a token, of shape `[0]`.

    Tensors of any dtype and shape. Several messages may be in flight. The n-th send on a channel
    meets the peer's n-th `pipeline_recv` on it. The tensors stay unchanged until `pipeline_wait(token)` or until their
    gradients have come. The token's backward waits for the gradients of those that need one: tie it to the loss with
    `join`.

    Raises:
        CollectiveMismatchError: on both ranks, in what waits, where shapes, dtypes or needs of gradients differ.
    """
    return torch.ops.weft.pipeline_send(tensors, peer, channel, group_name)


def pipeline_recv(like: list[Tensor], peer: int, channel: int, group_name: str) -> Tensor:
    """Posts the receive of what rank `peer` sends next on a channel; gives the token for `pipeline_wait`.

    `like` has its shapes, dtypes, devices and needs of gradients; values are not read, so
    `torch.empty((), requires_grad=True).expand(shape)` will do.
    """
    return torch.ops.weft.pipeline_recv(like, peer, channel, group_name)


def pipeline_wait(token: Tensor) -> list[Tensor]:
    """The tensors of a `pipeline_recv`, once for each token; their backward sends the gradients, in one message.

    For the token of a `pipeline_send` an empty list, as soon as what was sent may be changed.
    """
    return torch.ops.weft.pipeline_wait(token)


def pipeline_flush(group_name: str) -> None:
    """Waits until all that this rank has sent in the group has left: at the end of a step, before the group ends."""
    torch.ops.weft.pipeline_flush(group_name)


def join(x: Tensor, tokens: list[Tensor]) -> Tensor:
    """x, whose backward reaches the tokens of `pipeline_send` too; a stage without a loss passes a zero for x."""
    return torch.ops.weft.join(x, tokens)
