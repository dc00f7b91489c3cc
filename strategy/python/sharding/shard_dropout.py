"""Dropout on a sharded tensor, with the same mask as on one device.

The random states of a group's ranks are equal. Every rank draws the mask of the full tensor and takes its own shard, so
that afterwards the random states are still equal to each other, and to that of one device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class ShardedDim:
    """The dim along which a tensor is sharded, as verification saw it.

    ndim: the number of dims of the tensor. If the last dim is sharded, tensors with another number of dims match, too.
    dim: the dim that is sharded, as `shard_range` does.
    size: the size of that dim in the full tensor.
    """

    ndim: int
    dim: int
    size: int

    @classmethod
    def from_shapes(cls, full_shape: Sequence[int], shard_shape: Sequence[int], num_ranks: int) -> ShardedDim | None:
        """Return the dim along which a rank's tensor is a shard of the full one; None if the shapes are equal.

        Raises:
            ValueError: the shapes differ in their number of dims, in more than one dim, or by another factor than
                `num_ranks`.
        """
        differing = [dim for dim, (a, b) in enumerate(zip(full_shape, shard_shape, strict=False)) if a != b]
        if len(full_shape) == len(shard_shape) and not differing:
            return None
        if (
            len(full_shape) != len(shard_shape)
            or len(differing) != 1
            or full_shape[differing[0]] != num_ranks * shard_shape[differing[0]]
        ):
            raise ValueError(
                f"a dropout got {list(shard_shape)} of {list(full_shape)}, which must be one of {num_ranks} equal "
                "shards along one dim; apply it to tensors that have a dim of heads or features"
            )
        return cls(len(full_shape), differing[0], full_shape[differing[0]])

    def matches(self, shard: Tensor, rank: int, num_ranks: int) -> bool:
        """Return whether the sharded dim of a tensor has the size of this rank's shard."""
        dim = self.dim_of(shard)
        return dim is not None and shard.shape[dim] == range_of_shard(self.size, num_ranks, rank)[1]

    def dim_of(self, shard: Tensor) -> int | None:
        """Return the sharded dim of a tensor; None if its number of dims does not match."""
        if self.dim == self.ndim - 1 and shard.dim() > 0:
            return shard.dim() - 1
        return self.dim if shard.dim() == self.ndim else None


def range_of_shard(size: int, num_ranks: int, rank: int) -> tuple[int, int]:
    """Return the same (start, length) as `_plan.shard_range`, a function in C++ that torch.compile does not trace."""
    chunk = -(-size // num_ranks)
    start = min(rank * chunk, size)
    return start, min(chunk, size - start)


def shard_dropout(shard: Tensor, p: float, sharded: ShardedDim, rank: int, num_ranks: int) -> Tensor:
    """Return this rank's shard of the result of F.dropout with probability `p` on the full tensor.

    `rank`, `num_ranks`: this rank in the group, and the group's size.
    """
    sharded_dim = sharded.dim_of(shard)
    assert sharded_dim is not None
    start, length = range_of_shard(sharded.size, num_ranks, rank)
    # F.dropout draws in memory order; the full tensor is assumed to have the shard's order of dims in memory.
    order = sorted(range(shard.dim()), key=shard.stride, reverse=True)
    shape = [sharded.size if dim == sharded_dim else shard.shape[dim] for dim in order]
    inverse_order = [order.index(dim) for dim in range(shard.dim())]
    ones = torch.ones(shape, dtype=shard.dtype, device=shard.device).permute(inverse_order)
    return shard * F.dropout(ones, p, True).narrow(sharded_dim, start, length)
