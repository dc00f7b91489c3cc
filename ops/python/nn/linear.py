"""nn.Linear with its rows or columns sharded over a group, for full inputs or for shards of a sequence."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from weft.nn.shard import group_size_and_rank, shard_range


def _init_like_linear(weight: Tensor, bias: Tensor | None, fan_in: int) -> None:
    """Initialise from nn.Linear's distributions; `fan_in` is the fan-in of the unsharded layer, not of the shard."""
    bound = 1.0 / math.sqrt(fan_in) if fan_in > 0 else 0.0
    with torch.no_grad():
        weight.uniform_(-bound, bound)
        if bias is not None:
            bias.uniform_(-bound, bound)


class ColumnLinear(nn.Module):
    """x -> this rank's shard of x Wᵀ + b: `[..., in_features]` -> `[..., out_local]`.

    Args:
        in_features: size of the last dim of x.
        out_features: rows of the unsharded weight; this rank holds its torch.chunk shard of them.
        bias: whether there is a bias, which is sharded like the rows.
        group_name: c10d name of the group; "" for a group of one.
        device, dtype: of the parameters.

    Parameters `weight [out_local, in_features]`, `bias [out_local]`. Their initial values differ from the shards of an
    nn.Linear with the same seed; for equal results, copy the shards of an nn.Linear's parameters.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group_name: str,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_ranks, rank = group_size_and_rank(group_name)
        self.in_features = in_features
        self.out_features = out_features
        self.group_name = group_name
        _, rows = shard_range(out_features, num_ranks, rank)
        self.weight = nn.Parameter(torch.empty(rows, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(rows, device=device, dtype=dtype)) if bias else None
        _init_like_linear(self.weight, self.bias, in_features)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.weft.column_linear(x, self.weight, self.bias, group_name=self.group_name)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"


class RowLinear(nn.Module):
    """This rank's shard of x -> x Wᵀ summed over the group + b: `[..., in_local]` -> `[..., out_features]`.

    Args:
        in_features: columns of the unsharded weight; this rank holds its torch.chunk shard of them.
        out_features: size of the last dim of the result.
        bias: whether there is a bias, which is replicated on every rank and added once.
        group_name: c10d name of the group; "" for a group of one.
        device, dtype: of the parameters.

    Parameters `weight [out_features, in_local]`, `bias [out_features]`. The bias is initialised to zero, so that it is
    equal on every rank.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group_name: str,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_ranks, rank = group_size_and_rank(group_name)
        self.in_features = in_features
        self.out_features = out_features
        self.group_name = group_name
        _, columns = shard_range(in_features, num_ranks, rank)
        self.weight = nn.Parameter(torch.empty(out_features, columns, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype)) if bias else None
        _init_like_linear(self.weight, None, in_features)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.weft.row_linear(x, self.weight, self.bias, group_name=self.group_name)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"


class AllGatherLinear(ColumnLinear):
    """A ColumnLinear for x sharded along `gather_dim`: `[..., s, ..., in_features]` -> `[..., S, ..., out_local]`.

    Args:
        in_features, out_features, bias, group_name, device, dtype: as in ColumnLinear, with the same parameters.
        gather_dim: the sequence dim, along which x is sharded over the group; any dim but the last.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        gather_dim: int,
        group_name: str,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, group_name=group_name, device=device, dtype=dtype)
        self.gather_dim = gather_dim

    def forward(self, x: Tensor, dim_size: int | None = None) -> Tensor:
        """Return `[..., S, ..., out_local]`; `dim_size` is S, or None if all shards have equal sizes."""
        return torch.ops.weft.all_gather_linear(
            x, self.weight, self.bias, gather_dim=self.gather_dim, group_name=self.group_name, dim_size=dim_size
        )

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, gather_dim={self.gather_dim}"


class LinearReduceScatter(RowLinear):
    """A RowLinear, its result sharded along `scatter_dim`: `[..., S, ..., in_local]` -> `[..., s, ..., out_features]`.

    Args:
        in_features, out_features, bias, group_name, device, dtype: as in RowLinear, with the same parameters.
        scatter_dim: the sequence dim, along which the result is sharded by torch.chunk; any dim but the last.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        scatter_dim: int,
        group_name: str,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, group_name=group_name, device=device, dtype=dtype)
        self.scatter_dim = scatter_dim

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.weft.linear_reduce_scatter(
            x, self.weight, self.bias, scatter_dim=self.scatter_dim, group_name=self.group_name
        )

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, scatter_dim={self.scatter_dim}"


class ShardedLinear(ColumnLinear):
    """x Wᵀ + b with a sharded weight and a different x on each rank: `[..., in_features]` -> `[..., out_features]`.

    Args:
        in_features, out_features, bias, group_name, device, dtype: as in ColumnLinear, with the same parameters.

    The gradients of weight and bias are summed over the group.
    """

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.weft.sharded_linear(
            x, self.weight, self.bias, group_name=self.group_name, out_features=self.out_features
        )
