"""Attention over a sequence whose tokens are sharded over a group, and the order of its shards.

All functions are also in `weft.ops`, whose docstring has the rules that all operators share.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.nn.shard import group_size_and_rank, shard_range

Order = Literal["head_tail", "contiguous"]


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group_name: str,
    is_causal: bool = False,
    scale: float | None = None,
    sequence_size: int | None = None,
    order: Order = "head_tail",
    window: int | None = None,
    document_offsets: Tensor | None = None,
) -> Tensor:
    """Return F.scaled_dot_product_attention of a sharded sequence: each rank has a shard of the tokens, and all heads.

    Shapes: query `[batch, heads, s, head_dim]`, key and value `[batch, kv_heads, s, head_dim]` ->
    `[batch, heads, s, head_dim]`, with s the size of this rank's shard. kv_heads must divide heads (grouped-query
    attention). `scale` multiplies the scores; None: 1 / sqrt(head_dim).

    `order` says which tokens a rank has: see `shard_sequence`. `sequence_size` is the number of tokens of all ranks;
    without it all shards must have equal sizes, in the order "head_tail" even ones.

    With `window`, which needs `is_causal`, a query attends to the key of its token and to those of the window - 1
    tokens before it. Only the pairs of the window are computed, and with `order="contiguous"`, keys and values move
    only to the ranks that attend to them; the ranks' work is nearly equal in both orders.

    With `document_offsets`, a query attends to keys of its document only. They are the positions in the full sequence
    at which documents begin, in order: int32 or int64 `[documents]` for all rows of the batch, or `[batch, documents]`,
    the same on all ranks. They may contain 0 and the number of tokens, as cumulative lengths do, and repeat a position.
    Padding at the end is a document of its own. The host reads the offsets: on CUDA, pass them on the CPU, so that it
    need not wait, or in compiled code on the device.

    Each rank sends its keys and values to the next rank, and so on around the ring, while it computes the attention to
    the block before. Blocks are combined by their log-sum-exp, in float32 (in float64 for float64). With n ranks, a
    rank sends n - 1 messages of keys and values of one shard in the forward, and as many in the backward together with
    n - 1 messages of their gradients in float32. With `is_causal`, only pairs of chunks that the mask leaves are
    computed. Saves query, key, value, the result, and one number per token and head.

    Raises:
        ValueError: the shapes do not match, s is not the size of this rank's shard, `order` has another value,
            or `window` is not positive or given without `is_causal`, or `document_offsets` are no such positions.
        TypeError: the tensors are no floating-point tensors of one dtype.
        NotImplementedError: the tensors are on CUDA, and the backend of the group is gloo, which does not send them.

    Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite Context" (2023); blocks by
    torch's attention kernels.
    """
    return torch.ops.weft.ring_attention(
        query,
        key,
        value,
        group_name=group_name,
        is_causal=is_causal,
        scale=scale,
        sequence_size=sequence_size,
        order=order,
        window=window,
        document_offsets=document_offsets,
    )


def ulysses_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group_name: str,
    is_causal: bool = False,
    scale: float | None = None,
    sequence_size: int | None = None,
    window: int | None = None,
    document_offsets: Tensor | None = None,
    order: Order = "contiguous",
    ring_group_name: str = "",
) -> Tensor:
    """Return F.scaled_dot_product_attention of a sharded sequence, computed by heads.

    Shapes and options are those of `ring_attention`. One all-to-all gives each rank its heads for the
    full sequence, for which it computes torch's attention; a second one returns the shards of all heads. The backward
    has two all-to-alls as well. A key/value head that several ranks attend to is sent to each of them. Saves query, key
    and value of the rank's heads and the result of torch's attention, for the full sequence.

    With `ring_group_name`, the ranks are a grid, for more ranks than heads: r groups `group_name` of u ranks exchange
    heads, so that each rank has its heads for the tokens of its group, and the r ranks at the same place in their
    groups compute ring attention of these. Rank j of group i has the shard of rank i * u + j of r * u, in `order`.
    Besides the all-to-alls, a rank sends r - 1 messages instead of r * u - 1, each with as many bytes.

    Except for "contiguous" shards without a ring, shards of unequal sizes are exchanged with zeros behind them, which
    no token attends to.

    Raises:
        ValueError: as `ring_attention`, and if the ranks of `group_name` do not divide the number of query heads.
        TypeError: the tensors are no floating-point tensors of one dtype.
        NotImplementedError: with a ring: the tensors are on CUDA, and its backend is gloo, which does not send them.

    Jacobs et al., "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence Transformer
    Models" (2023); with a ring, Fang and Zhao, "USP: A Unified Sequence Parallelism Approach for Long Context
    Generative AI" (2024), which is "a2a+p2p" of Megatron-LM's context parallelism.
    """
    return torch.ops.weft.ulysses_attention(
        query,
        key,
        value,
        group_name=group_name,
        is_causal=is_causal,
        scale=scale,
        sequence_size=sequence_size,
        window=window,
        document_offsets=document_offsets,
        order=order,
        ring_group_name=ring_group_name,
    )


def shard_sequence(x: Tensor, dim: int, group_name: str, *, order: Order = "head_tail") -> Tensor:
    """Return this rank's shard of x along `dim`, the tokens of a sequence; the backward all-gathers the gradient.

    x is equal on all ranks. The sequence is divided into chunks like torch.chunk, for n ranks:

    - "head_tail": into 2n chunks; rank r has chunk r and behind it chunk 2n - 1 - r. With a causal mask, all ranks then
      have nearly the same amount of attention to compute. This is the zig-zag order of Megatron-LM's context
      parallelism; Brandon et al., "Striped Attention" (2023), balance by interleaving single tokens.
    - "contiguous": into n chunks, as `scatter_to_group` does.

    Shard everything that belongs to a token in the same way: ids, targets, positions.

    Raises:
        ValueError: `order` has another value.
        IndexError: x has no such dim.
    """
    if _checked_order("shard_sequence", order) == "contiguous":
        return torch.ops.weft.scatter_to_group(x, dim, group_name)
    num_ranks, rank = group_size_and_rank(group_name)
    tokens = _head_tail_tokens(x.size(_checked_dim("shard_sequence", x, dim)), num_ranks)
    longest = max(map(len, tokens))
    # Shards of equal sizes, padded with copies of the first token: the padding is dropped, and gets no gradient.
    indices = torch.cat([F.pad(each, (0, longest - len(each))) for each in tokens]).to(x.device)
    shard = torch.ops.weft.scatter_to_group(x.index_select(dim, indices), dim, group_name)
    return shard if len(tokens[rank]) == longest else shard.narrow(dim, 0, len(tokens[rank])).contiguous()


def unshard_sequence(
    x: Tensor, dim: int, group_name: str, *, order: Order = "head_tail", dim_size: int | None = None
) -> Tensor:
    """Return the full sequence, of which x is this rank's shard along `dim`; the backward returns a shard.

    The opposite of `shard_sequence`, by an all-gather. All ranks must use the result alike: the gradient must be equal
    on all ranks. `dim_size` is the full size of `dim`; without it all shards must have equal sizes, in the order
    "head_tail" even ones.

    Raises:
        ValueError: x does not have the size of this rank's shard, or `order` has another value.
        IndexError: x has no such dim.
    """
    if _checked_order("unshard_sequence", order) == "contiguous":
        return torch.ops.weft.gather_from_group(x, dim, group_name, dim_size=dim_size)
    num_ranks, rank = group_size_and_rank(group_name)
    own_size = x.size(_checked_dim("unshard_sequence", x, dim))
    if dim_size is None and num_ranks > 1 and own_size % 2:
        raise ValueError(
            f"weft.ops.unshard_sequence: got x of shape {list(x.shape)} without dim_size, which needs an even size of "
            f"dim {dim}; pass dim_size, the size of all shards together."
        )
    full_size = own_size * num_ranks if dim_size is None else dim_size
    expected_size = sum(length for _, length in _head_tail_chunks(full_size, num_ranks, rank))
    if own_size != expected_size:
        raise ValueError(
            f"weft.ops.unshard_sequence: got x of shape {list(x.shape)} on rank {rank} of {num_ranks} with dim_size "
            f"{dim_size}, of which this rank's shard has {expected_size} in dim {dim}; pass the shard that "
            "shard_sequence returns, and the full size."
        )
    tokens = _head_tail_tokens(full_size, num_ranks)
    longest = max(map(len, tokens))
    if own_size < longest:
        padding = list(x.shape)
        padding[dim] = longest - own_size
        x = torch.cat([x, x.new_zeros(padding)], dim)
    gathered = torch.ops.weft.gather_from_group(x, dim, group_name)
    rows = torch.empty(sum(map(len, tokens)), dtype=torch.int64, device="cpu")  # of `gathered`, by token
    for each, of_rank in enumerate(tokens):
        rows[of_rank] = torch.arange(len(of_rank), device="cpu") + each * longest
    return gathered.index_select(dim, rows.to(x.device))


def _checked_order(function: str, order: str) -> str:
    if order not in ("head_tail", "contiguous"):
        raise ValueError(f"weft.ops.{function}: got order {order!r}; pass 'head_tail' or 'contiguous'.")
    return order


def _checked_dim(function: str, x: Tensor, dim: int) -> int:
    if not -x.dim() <= dim < x.dim():
        raise IndexError(
            f"weft.ops.{function}: got dim {dim} for x with {x.dim()} dims; pass one from {-x.dim()} to {x.dim() - 1} "
            "(x must have at least one dim)."
        )
    return dim


def _head_tail_chunks(size: int, num_ranks: int, rank: int) -> list[tuple[int, int]]:
    """Return (start, length) of a rank's two chunks in a sequence of `size` tokens."""
    return [shard_range(size, 2 * num_ranks, each) for each in (rank, 2 * num_ranks - 1 - rank)]


def _head_tail_tokens(size: int, num_ranks: int) -> list[Tensor]:
    """Return the positions of each rank's tokens in a sequence of `size` tokens."""
    return [
        torch.cat(
            [torch.arange(start, start + n, device="cpu") for start, n in _head_tail_chunks(size, num_ranks, rank)]
        )
        for rank in range(num_ranks)
    ]
