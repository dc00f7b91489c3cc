"""Dropout on a tensor of which each rank has a shard, with the draws that one device makes for all of it.

Every rank draws the mask of the full tensor, from the random state that the ranks of a group share, and takes its own
part. So all ranks go on with the random numbers of one device.
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
    def between(cls, full: Sequence[int], part: Sequence[int], num_ranks: int) -> ShardedDim | None:
        """The one dim in which a rank's shape differs from the full one by the number of ranks; None for equal shapes.

        Raises:
            ValueError: they differ in another way.
        """
        differing = [dim for dim, (a, b) in enumerate(zip(full, part, strict=False)) if a != b]
        if len(full) == len(part) and not differing:
            return None
        if len(full) != len(part) or len(differing) != 1 or full[differing[0]] != num_ranks * part[differing[0]]:
            raise ValueError(f"a dropout gets {list(part)} of {list(full)}, which is not one rank's share of one dim")
        return cls(len(full), differing[0], full[differing[0]])

    def is_of(self, part: Tensor, num_ranks: int) -> bool:
        """Whether a tensor may be one rank's share."""
        return part.dim() == self.ndim and part.shape[self.dim] * num_ranks == self.size


def shard_dropout(part: Tensor, p: float, sharded: ShardedDim, rank: int, num_ranks: int) -> Tensor:
    """Dropout with probability `p` of one rank's share, as F.dropout gives it for the full tensor on one device."""
    length = part.shape[sharded.dim]
    # Numbers are drawn in the order in which the elements lie, which the full tensor has in the same way.
    order = sorted(range(part.dim()), key=part.stride, reverse=True)
    shape = [length * num_ranks if dim == sharded.dim else part.shape[dim] for dim in order]
    back = [order.index(dim) for dim in range(part.dim())]
    ones = torch.ones(shape, dtype=part.dtype, device=part.device).permute(back)
    return part * F.dropout(ones, p, True).narrow(sharded.dim, rank * length, length)
