"""Typed calls of weft's operators (`torch.ops.weft.*`), for eager code, torch.compile and torch.export.

Weights are this rank's shards in nn.Linear's layout `[out, in]`, those of embeddings `[rows, dim]`; norms have
replicated weights. `group_name` is c10d's name of a process group (`mesh.get_group("tensor_parallel").group_name`); ""
is the name of a group of one.

The tensors of a call have one device and one dtype: float32, float64, bfloat16 or float16. Exceptions: ids and targets
are integers, norms also accept float32 parameters with a half-precision x, the seed of `dropout` is an int64 on the
CPU, and `copy_to_group` and the operators after it support every dtype of the group's backend.

Under torch.autocast, operators with matrix products cast their tensors as nn.Linear does, `add_rms_norm` and
`add_layer_norm` promote x and residual to a common dtype, and other operators do not cast. Invalid arguments raise
ValueError, TypeError or IndexError before any communication. Only `dropout`, `reduce_from_group` and `join` support
second derivatives. "Saves" lists the tensors, besides weights, that the forward saves for the backward.

Attention over a sharded sequence is in weft.context_parallel, and a mixture of experts in weft.experts. The optimizer
steps and the conversions of their formats have other rules: see weft.optimizer_steps.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from weft import context_parallel, experts, optimizer_steps

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
Order = context_parallel.Order
DispatchedRows = experts.DispatchedRows
Reduction = Literal["none", "mean", "sum"]

ring_attention = context_parallel.ring_attention
ulysses_attention = context_parallel.ulysses_attention
shard_sequence = context_parallel.shard_sequence
unshard_sequence = context_parallel.unshard_sequence
grouped_linear = experts.grouped_linear
moe_dispatch = experts.moe_dispatch
moe_combine = experts.moe_combine
route = experts.route
load_balancing_loss = experts.load_balancing_loss
router_z_loss = experts.router_z_loss
adam_step_ = optimizer_steps.adam_step_
momentum_step_ = optimizer_steps.momentum_step_
split_float = optimizer_steps.split_float
join_float = optimizer_steps.join_float
quantize_blocks = optimizer_steps.quantize_blocks
dequantize_blocks = optimizer_steps.dequantize_blocks


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
    """Return act(x w1ᵀ + b1) [* (x w3ᵀ + b3)] w2ᵀ, summed over the group, + b2.

    Shapes: x `[..., d]`, w1 and w3 `[f, d]`, b1 and b3 `[f]`, w2 `[o, f]`, b2 `[o]` (replicated on every rank, added
    once) -> `[..., o]`. f is the size of this rank's shard of the hidden dim; ranks may have different f, also 0. One
    all-reduce forward, one backward (none if x requires no gradient). Saves x, x w1ᵀ + b1 and x w3ᵀ + b3; with
    `recompute` only x.

    Sequence parallelism: with `sequence_dim`, any dim but the last, x and the result are sharded by torch.chunk along
    this dim. `sequence_size` is the dim's unsharded size; None: all shards must have equal sizes. The forward
    all-gathers x and reduce-scatters the result. Only the shard of x is saved, not the gathered x: the backward
    all-gathers x and the result's gradient, and reduce-scatters x's gradient.
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
    """Return x weightᵀ + bias with the rows of weight sharded: `[..., d]` -> `[..., f]`.

    weight `[f, d]` and bias `[f]` are this rank's shards; x is equal on all ranks.
    One all-reduce of x's gradient backward, none forward.
    """
    return torch.ops.weft.column_linear(x, weight, bias, group_name=group_name)


def row_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, group_name: str) -> Tensor:
    """Return x weightᵀ summed over the group, + bias, with the columns of weight sharded: `[..., f]` -> `[..., o]`.

    x and weight `[o, f]` are this rank's shards; bias `[o]` is replicated on every rank and added once.
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
    """Return gather(x) weightᵀ + bias, with x sharded along `gather_dim`: `[..., s, ..., d]` -> `[..., S, ..., f]`.

    x is this rank's torch.chunk shard along `gather_dim`, any dim but the last, whose unsharded size is `dim_size`;
    without `dim_size` all shards must have equal sizes. weight `[f, d]`, bias `[f]`. Saves only the shard of x. One
    all-gather forward; one all-gather of x and one reduce-scatter of x's gradient backward. A chunked call runs these
    collectives once per chunk: see `weft.overlap`.
    """
    return torch.ops.weft.all_gather_linear(
        x, weight, bias, gather_dim=gather_dim, group_name=group_name, dim_size=dim_size
    )


def linear_reduce_scatter(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, scatter_dim: int, group_name: str
) -> Tensor:
    """Return this rank's shard along `scatter_dim` of x weightᵀ summed over the group, + bias.

    Shapes: x `[..., S, ..., f]`, weight `[o, f]`, bias `[o]` (replicated on every rank, added once) ->
    `[..., s, ..., o]`, with s the size of this rank's torch.chunk shard of S; `scatter_dim` is any dim but the last.
    One reduce-scatter forward, one all-gather backward; a chunked call runs one per chunk: see `weft.overlap`.
    """
    return torch.ops.weft.linear_reduce_scatter(x, weight, bias, scatter_dim=scatter_dim, group_name=group_name)


def sharded_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, group_name: str, out_features: int | None = None
) -> Tensor:
    """Return x weightᵀ + bias with a sharded weight and a different x on each rank: `[..., d]` -> `[..., out]`.

    weight `[n, d]` and bias `[n]` are this rank's torch.chunk shards of `out_features` rows; without `out_features` all
    shards must have equal sizes. Each shard of the weight is broadcast, multiplied and freed in turn: a rank holds at
    most two shards of other ranks. Gradients of weight and bias are summed over the group. Forward: one broadcast of
    each shard. Backward: one broadcast of each shard, for x's gradient, and one reduce of each shard's gradient. The
    bias adds one all-gather forward and one reduce-scatter backward.
    """
    return torch.ops.weft.sharded_linear(x, weight, bias, group_name=group_name, out_features=out_features)


def vocab_parallel_embedding(
    input: Tensor, weight: Tensor, vocab_start: int, *, group_name: str, vocab_size: int | None = None
) -> Tensor:
    """Return rows of a row-sharded table: ids `[...]` (int64 or int32, in the full vocabulary) -> `[..., d]`.

    weight `[v, d]` holds this rank's rows, from vocab_start on. One all-reduce forward. With `vocab_size`, CPU ids
    outside `[0, vocab_size)` raise IndexError; without `vocab_size`, and on CUDA, these ids give zeros.
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
    """Return F.cross_entropy of class-sharded logits: `[..., v]` on this rank, of the classes from vocab_start on.

    target `[...]` (int64 or int32, among all classes) -> `[]` or `[...]`, in float32 (float64 for float64 logits).
    `vocab_size` is the number of classes of all ranks together; without it all ranks must have equally many classes.
    With `vocab_size`, CPU targets outside `[0, vocab_size)` other than `ignore_index` raise IndexError. One all-gather
    of four numbers per token forward, none backward. Saves the logits and two numbers per token; the only other tensor
    as large as the logits is their gradient.
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
    """Return vocab_parallel_cross_entropy of the logits x weightᵀ, computed for one chunk of tokens at a time.

    x `[..., d]` is equal on all ranks; weight `[v, d]` holds this rank's rows of the output matrix. One all-gather of
    four numbers per token forward, one all-reduce of x's gradient backward. The backward recomputes the logits. Saves x
    and two numbers per token.
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
    """Return the RMS norm of x over its last dim, times weight: `[..., d]` -> `[..., d]`; weight `[d]`.

    `group_name` is the group over which the tokens of x are sharded: weight is replicated on every rank, and its
    gradient is summed over the group in one all-reduce backward. Pass "" if every rank has all tokens: there is then no
    communication. A half-precision x is computed in float32; its weight has x's dtype or float32. Saves x and one
    number per token.
    """
    return torch.ops.weft.rms_norm(x, weight, group_name=group_name, eps=eps)


def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, group_name: str, eps: float = 1e-5
) -> Tensor:
    """Return the layer norm of x over its last dim, times weight, plus bias; otherwise like `rms_norm`.

    The gradients of weight and bias are summed together, in one all-reduce. Saves x and two numbers per token.
    """
    return torch.ops.weft.layer_norm(x, weight, bias, group_name=group_name, eps=eps)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, *, group_name: str, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(x + residual), x + residual), computed in one pass over memory.

    Saves the sum instead of x, in the dtype of x and residual. Under autocast both are promoted to a common dtype.
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
    """Return (layer_norm(x + residual), x + residual); like `add_rms_norm`."""
    return torch.ops.weft.add_layer_norm(x, residual, weight, bias, group_name=group_name, eps=eps)


def dropout(
    x: Tensor, seed: Tensor, *, p: float, group_name: str, dim: int | None = None, dim_size: int | None = None
) -> Tensor:
    """Return x / (1 - p), or 0 with probability p, as nn.Dropout.

    The mask depends only on the seed and the element's index in the unsharded tensor. Without `dim`, x is replicated on
    every rank. With `dim`, x is this rank's shard along `dim`, whose unsharded size is `dim_size`; without `dim_size`
    all shards must have equal sizes. The ranks must pass the same seed, one int64 on the CPU; they then drop the
    elements that an unsharded call drops, on any device. Under tracing with x on a GPU, the seed must have no dims. The
    backward recomputes the mask; there is no communication.
    """
    return torch.ops.weft.dropout(x, seed, p=p, group_name=group_name, dim=dim, dim_size=dim_size)


def copy_to_group(x: Tensor, group_name: str) -> Tensor:
    """Return x; the backward all-reduces the gradient: for a replicated tensor that sharded layers use."""
    return torch.ops.weft.copy_to_group(x, group_name)


def reduce_from_group(x: Tensor, group_name: str) -> Tensor:
    """Return x summed over the group, by all-reduce; the backward passes the gradient on unchanged."""
    return torch.ops.weft.reduce_from_group(x, group_name)


def scatter_to_group(x: Tensor, dim: int, group_name: str) -> Tensor:
    """Return this rank's shard of x along `dim`; the backward all-gathers the gradient.

    In this and the following operators, shards are those of torch.chunk: `ceil(size / ranks)` long, later ones shorter
    or empty.
    """
    return torch.ops.weft.scatter_to_group(x, dim, group_name)


def gather_from_group(x: Tensor, dim: int, group_name: str, *, dim_size: int | None = None) -> Tensor:
    """Return the unsharded tensor of which x is this rank's shard; the backward returns a shard of the gradient.

    For a result that all ranks use alike: its gradient must be equal on all ranks. `dim_size` is the size of the
    unsharded `dim`; without `dim_size` all shards must have equal sizes.
    """
    return torch.ops.weft.gather_from_group(x, dim, group_name, dim_size=dim_size)


def gather_from_sequence(x: Tensor, dim: int, group_name: str, *, dim_size: int | None = None) -> Tensor:
    """Return the unsharded tensor of which x is this rank's shard; the backward reduce-scatters the gradients.

    For a result that each rank uses differently, as before a column linear layer in sequence parallelism.
    `dim` and `dim_size` are those of `gather_from_group`.
    """
    return torch.ops.weft.gather_from_sequence(x, dim, group_name, dim_size=dim_size)


def reduce_scatter_to_sequence(x: Tensor, dim: int, group_name: str) -> Tensor:
    """Return this rank's shard along `dim` of x summed over the group; the backward all-gathers the gradient."""
    return torch.ops.weft.reduce_scatter_to_sequence(x, dim, group_name)


def all_to_all(x: Tensor, split_dim: int, cat_dim: int, group_name: str, *, cat_size: int | None = None) -> Tensor:
    """Return x sharded along `split_dim` instead of `cat_dim`; x is full along `split_dim`, the result along `cat_dim`.

    Shard r of x along `split_dim` goes to rank r. `cat_size` is the size of the unsharded `cat_dim`; without `cat_size`
    all shards must have equal sizes. The backward is the all-to-all in the opposite direction.
    """
    return torch.ops.weft.all_to_all(x, split_dim, cat_dim, group_name, cat_size=cat_size)


def pipeline_send(tensors: list[Tensor], peer: int, channel: int, group_name: str) -> Tensor:
    """Send tensors to rank `peer` of the group on a channel, 0 to 1022; return a token, of shape `[0]`.

    The tensors may have any dtypes and shapes. Several messages may be in flight. The n-th send on a channel matches
    the peer's n-th `pipeline_recv` on this channel. Do not change the tensors until `pipeline_wait(token)` returns or
    their gradients have arrived. The token's backward receives the gradients of the tensors that require a gradient:
    connect the token to the loss with `join`. Messages are not supported under torch.compile and torch.export.

    Raises:
        CollectiveMismatchError: on both ranks, in the waiting call, if the tensors differ from the peer's `like` in
            number, shapes, dtypes or requires_grad.
    """
    return torch.ops.weft.pipeline_send(tensors, peer, channel, group_name)


def pipeline_recv(like: list[Tensor], peer: int, channel: int, group_name: str) -> Tensor:
    """Post the receive of the next message from rank `peer` on a channel; return the token for `pipeline_wait`.

    `like` gives the shapes, dtypes, devices and requires_grad of the message's tensors. Its values are not read:
    `torch.empty((), requires_grad=True).expand(shape)` suffices.
    """
    return torch.ops.weft.pipeline_recv(like, peer, channel, group_name)


def pipeline_wait(token: Tensor) -> list[Tensor]:
    """Return the tensors of a `pipeline_recv`, once per token; their backward sends their gradients in one message.

    For the token of a `pipeline_send`, returns an empty list as soon as the caller may change the sent tensors.
    """
    return torch.ops.weft.pipeline_wait(token)


def pipeline_flush(group_name: str) -> None:
    """Wait until all sends of this rank in the group have completed.

    Call `pipeline_flush` at the end of each training step and before the group is destroyed.
    """
    torch.ops.weft.pipeline_flush(group_name)


def join(x: Tensor, tokens: list[Tensor]) -> Tensor:
    """Return x with an autograd edge to tokens of `pipeline_send`: its backward receives the sent tensors' gradients.

    A stage that computes no loss passes a zero tensor as x, and calls backward on the result.
    """
    return torch.ops.weft.join(x, tokens)
