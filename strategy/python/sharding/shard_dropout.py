"""Dropout on a sharded tensor, with the same mask as on one device.

Every rank draws the mask of the full tensor from the random state that the ranks of a group share, and takes its own
shard. Afterwards the random states of all ranks are still equal to that of one device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class ShardedDim:
    """A tensor of `ndim` dims whose dim `dim` has `size` elements on one device, divided evenly among the ranks."""

    ndim: int
    dim: int
    size: int

    @classmethod
    def between(cls, full: Sequence[int], shard_shape: Sequence[int], num_ranks: int) -> ShardedDim | None:
        """Return the only dim in which a rank's shape differs, by the factor `num_ranks`; None for equal shapes.

        Raises:
            ValueError: the shapes differ in another way.
        """
        differing = [dim for dim, (a, b) in enumerate(zip(full, shard_shape, strict=False)) if a != b]
        if len(full) == len(shard_shape) and not differing:
            return None
        if (
            len(full) != len(shard_shape)
            or len(differing) != 1
            or full[differing[0]] != num_ranks * shard_shape[differing[0]]
        ):
            raise ValueError(f"a dropout got {list(shard_shape)} of {list(full)}, which is not a shard along one dim")
        return cls(len(full), differing[0], full[differing[0]])

    def matches(self, shard: Tensor, num_ranks: int) -> bool:
        """Return whether a tensor may be one rank's shard."""
        return shard.dim() == self.ndim and shard.shape[self.dim] * num_ranks == self.size


def shard_dropout(shard: Tensor, p: float, sharded: ShardedDim, rank: int, num_ranks: int) -> Tensor:
    """Return this rank's shard of the result of F.dropout with probability `p` on the full tensor."""
    length = shard.shape[sharded.dim]
    # F.dropout draws in memory order; the full tensor is assumed to have the shard's order of dims in memory.
    order = sorted(range(shard.dim()), key=shard.stride, reverse=True)
    shape = [length * num_ranks if dim == sharded.dim else shard.shape[dim] for dim in order]
    inverse_order = [order.index(dim) for dim in range(shard.dim())]
    ones = torch.ones(shape, dtype=shard.dtype, device=shard.device).permute(inverse_order)
    return shard * F.dropout(ones, p, True).narrow(sharded.dim, rank * length, length)
