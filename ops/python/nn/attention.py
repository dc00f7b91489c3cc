"""ParallelAttention: an attention block whose heads are sharded over a group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.nn.heads import broadcast_values, check_kv_group, local_heads
from weft.nn.linear import _init_like_linear
from weft.nn.shard import group_size_and_rank


class _Projection(nn.Module):
    """One projection of the block: a weight `[rows, columns]` and an optional bias `[rows]`."""

    def __init__(
        self, rows: int, columns: int, bias: bool, device: torch.device | None, dtype: torch.dtype | None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(rows, device=device, dtype=dtype)) if bias else None

    def extra_repr(self) -> str:
        return f"{self.weight.size(1)}, {self.weight.size(0)}, bias={self.bias is not None}"


class ParallelAttention(nn.Module):
    """Attention over the last dim but one, with its heads sharded over a group: x `[..., S, dim]` -> `[..., S, dim]`.

    One all-reduce forward and one backward. With `sequence_dim`: one all-gather and one reduce-scatter forward, two
    all-gathers and one reduce-scatter backward. In addition, the backward all-reduces the gradients of replicated
    key/value heads over the ranks that hold copies, and any gradients of cos, sin and mask over the group.

    Args:
        dim: size of the last dim of x and of the result.
        num_heads: query heads of the unsharded block; a multiple of the number of ranks.
        num_kv_heads: key/value heads of the unsharded block, a divisor of num_heads; default num_heads. A multiple of
            the number of ranks: these heads are sharded. A smaller divisor of the number of ranks: these heads are
            replicated, that is, neighbouring ranks hold equal copies of one head and sum its gradients.
        group_name: c10d name of the group; "" for a group of one.
        kv_group_name: c10d name of the group of ranks that hold copies of this rank's key/value head, from
            `weft.nn.kv_groups`. Required if key/value heads are replicated, unless there is only one such head. The
            constructor broadcasts the initial values of replicated heads among the ranks that hold copies, so these
            ranks must construct the module together.
        head_dim: default dim / num_heads.
        fused_qkv: True: one projection `qkv`. False: projections `q`, `k` and `v`, whose weights are concatenated in
            every forward; the concatenated weight is saved for the backward.
        bias: whether q, k and v have biases.
        out_bias: whether the output projection has a bias; default `bias`.
        causal: no query attends to later keys, even where the mask allows it.
        sequence_dim: if given, x and the result are sharded by torch.chunk along this dim, which must be the last but
            one.
        device, dtype: of the parameters.

    Parameters, for h query heads and kv key/value heads on this rank: `qkv.weight [(h + 2 * kv) * head_dim, dim]`, in
    the order q|k|v (or `q.weight [h * head_dim, dim]`, `k.weight` and `v.weight [kv * head_dim, dim]`), and biases with
    the same rows; `out.weight [dim, h * head_dim]`, the columns of this rank's query heads; `out.bias [dim]`,
    replicated on every rank, initialised to zero and added once. `weft.nn.shard_qkv` shards the qkv weight and bias of
    a checkpoint.

    Raises:
        ValueError: the numbers of heads do not fit each other or the number of ranks; `kv_group_name` is required and
            missing, or names another group.
    """

    if TYPE_CHECKING:  # either qkv, or q, k and v; the others are None, which TorchScript checks
        qkv: Any
        q: Any
        k: Any
        v: Any

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        group_name: str,
        kv_group_name: str | None = None,
        head_dim: int | None = None,
        fused_qkv: bool = True,
        bias: bool = False,
        out_bias: bool | None = None,
        causal: bool = False,
        sequence_dim: int | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_ranks, rank = group_size_and_rank(group_name)
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        heads, kv_heads = local_heads("ParallelAttention", num_heads, num_kv_heads, num_ranks, rank)
        if head_dim is None and dim % num_heads:
            raise ValueError(
                f"ParallelAttention: got dim {dim}, which is not a multiple of num_heads {num_heads}; pass head_dim."
            )
        self.kv_group_name = check_kv_group("ParallelAttention", num_kv_heads, group_name, kv_group_name)
        self.group_name = group_name
        self.dim = dim
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = dim // num_heads if head_dim is None else head_dim
        self.num_local_heads = len(heads)
        self.num_local_kv_heads = len(kv_heads)
        self.causal = causal
        self.sequence_dim = sequence_dim

        def projection(num_local: int) -> _Projection:
            made = _Projection(num_local * self.head_dim, dim, bias, device, dtype)
            _init_like_linear(made.weight, made.bias, dim)
            return made

        self.qkv = projection(len(heads) + 2 * len(kv_heads)) if fused_qkv else None
        self.q = None if fused_qkv else projection(len(heads))
        self.k = None if fused_qkv else projection(len(kv_heads))
        self.v = None if fused_qkv else projection(len(kv_heads))
        with_bias = bias if out_bias is None else out_bias
        self.out = _Projection(dim, len(heads) * self.head_dim, with_bias, device, dtype)
        _init_like_linear(self.out.weight, None, num_heads * self.head_dim)
        if self.kv_group_name:
            self._broadcast_replicated_heads()

    def forward(
        self,
        x: Tensor,
        cos: Tensor | None = None,
        sin: Tensor | None = None,
        mask: Tensor | None = None,
        sequence_size: int | None = None,
    ) -> Tensor:
        """Return `[..., S, dim]`; with `sequence_dim`, this rank's shard.

        S is always the length of the unsharded sequence, also in the shapes of cos, sin and mask.

        Args:
            x: `[..., S, dim]`; with `sequence_dim`, this rank's shard.
            cos, sin: `[S, head_dim]` or `[..., S, head_dim]`: rotary embedding of queries and keys. With (x1, x2) the
                halves of a head: (x1, x2) * cos + (-x2, x1) * sin.
            mask: `[S, S]` or `[..., 1, S, S]`, the same for all heads; bool (True: attend) or added to the scores.
            sequence_size: S; only with `sequence_dim`. None: all shards of the sequence must have equal sizes.
        """
        self._check(x, cos, sin, mask, sequence_size)
        if self.qkv is not None:
            weight = self.qkv.weight
            bias = self.qkv.bias
        else:
            weight = torch.cat([self.q.weight, self.k.weight, self.v.weight])
            bias = self.q.bias
            if bias is not None:
                bias = torch.cat([bias, self.k.bias, self.v.bias])
        weight = self._sum_gradients_of_copies(weight)
        if bias is not None:
            bias = self._sum_gradients_of_copies(bias)
        if self.sequence_dim is not None:
            qkv = torch.ops.weft.all_gather_linear(
                x, weight, bias, gather_dim=self.sequence_dim, group_name=self.group_name, dim_size=sequence_size
            )
            y = self._attend(qkv, cos, sin, mask)
            return torch.ops.weft.linear_reduce_scatter(
                y, self.out.weight, self.out.bias, scatter_dim=self.sequence_dim, group_name=self.group_name
            )
        qkv = torch.ops.weft.column_linear(x, weight, bias, group_name=self.group_name)
        y = self._attend(qkv, cos, sin, mask)
        return torch.ops.weft.row_linear(y, self.out.weight, self.out.bias, group_name=self.group_name)

    def _attend(self, qkv: Tensor, cos: Tensor | None, sin: Tensor | None, mask: Tensor | None) -> Tensor:
        """`[..., S, (h + 2 * kv) * head_dim]` -> `[..., S, h * head_dim]`."""
        h, kv = self.num_local_heads, self.num_local_kv_heads
        # torch.compile cannot trace Tensor.unflatten while a default device is set.
        heads = torch.unflatten(qkv, -1, [h + 2 * kv, self.head_dim]).transpose(-3, -2)
        qk, v = heads.split([h + kv, kv], dim=-3)
        if cos is not None and sin is not None:
            cos, sin = self._sum_gradient(cos).unsqueeze(-3), self._sum_gradient(sin).unsqueeze(-3)
            first, second = qk.chunk(2, -1)
            qk = (qk * cos + torch.cat([-second, first], -1) * sin).to(v.dtype)
        q, k = qk.split([h, kv], dim=-3)
        if mask is not None:
            mask = self._sum_gradient(mask)
            mask = mask if mask.dtype == torch.bool else mask.to(q.dtype)
            if self.causal:  # SDPA accepts only one of is_causal and a mask
                later = torch.ones(q.size(-2), q.size(-2), dtype=torch.bool, device=q.device).triu(1)
                mask = mask.masked_fill(later, 0.0 if mask.dtype == torch.bool else -float("inf"))
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=self.causal and mask is None, enable_gqa=h != kv
        )
        return y.transpose(-3, -2).flatten(-2)

    def _sum_gradient(self, tensor: Tensor) -> Tensor:
        """Return a replicated tensor that each rank uses for its own heads; the backward all-reduces its gradient."""
        return torch.ops.weft.copy_to_group(tensor, self.group_name) if tensor.requires_grad else tensor

    def _sum_gradients_of_copies(self, rows: Tensor) -> Tensor:
        """Return the rows q|k|v; the backward sums the gradients of k and v over the ranks that hold copies."""
        if self.kv_group_name == "" or not torch.is_grad_enabled():
            return rows
        q, kv = rows.split([self.num_local_heads * self.head_dim, 2 * self.num_local_kv_heads * self.head_dim])
        return torch.cat([q, torch.ops.weft.copy_to_group(kv, self.kv_group_name)])

    def _check(
        self, x: Tensor, cos: Tensor | None, sin: Tensor | None, mask: Tensor | None, sequence_size: int | None
    ) -> None:
        if x.dim() < 2:
            raise ValueError(f"ParallelAttention: got x with {x.dim()} dims; pass [..., sequence, {self.dim}].")
        if self.sequence_dim is not None:
            if self.sequence_dim % x.dim() != x.dim() - 2:
                raise ValueError(
                    f"ParallelAttention: got sequence_dim {self.sequence_dim} for x with {x.dim()} dims; the sequence "
                    "must be the last dim but one."
                )
        elif sequence_size is not None:
            raise ValueError(
                "ParallelAttention: got sequence_size without sequence_dim; pass sequence_dim to the constructor."
            )
        if (cos is None) != (sin is None):
            raise ValueError("ParallelAttention: got one of cos and sin; pass both or neither.")
        for table in (cos, sin):
            if table is not None and (table.size(-1) != self.head_dim or self.head_dim % 2 != 0):
                raise ValueError(
                    f"ParallelAttention: got cos or sin of {table.size(-1)} features for heads of {self.head_dim}; "
                    "both must have the same even number of features."
                )
        if mask is not None:
            if mask.dim() > 2 and mask.size(-3) != 1:
                raise ValueError(
                    f"ParallelAttention: got a mask for {mask.size(-3)} heads; pass one mask for all heads, "
                    "[sequence, sequence] or [..., 1, sequence, sequence]."
                )
            if mask.dtype != torch.bool and not mask.is_floating_point():
                raise ValueError(
                    "ParallelAttention: got a mask of integers; pass bool (True: attend), or floats (added to scores)."
                )

    @torch.no_grad()
    def _broadcast_replicated_heads(self) -> None:
        if self.qkv is None:
            copies = [*self.k.parameters(), *self.v.parameters()]
        else:
            num_rows = 2 * self.num_local_kv_heads * self.head_dim
            copies = [parameter[-num_rows:] for parameter in self.qkv.parameters()]
        for rows in copies:
            broadcast_values(rows, self.kv_group_name)

    def extra_repr(self) -> str:
        return (
            f"{self.dim}, {self.num_heads}, {self.num_kv_heads}, head_dim={self.head_dim}, causal={self.causal}, "
            f"sequence_dim={self.sequence_dim}"
        )
