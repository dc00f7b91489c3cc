"""The process groups of context parallelism, whose ranks are the innermost ones of the axis data_parallel."""

from __future__ import annotations

from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor


class ContextGroups(NamedTuple):
    """The groups of this rank.

    context: the ranks that compute shards of the same sequences.
    data: the ranks with different data, and the same place in their context-parallel groups.
    same_data: the ranks that compute one batch together: those along the context- and tensor-parallel axes.
    """

    context: dist.ProcessGroup
    data: dist.ProcessGroup
    same_data: dist.ProcessGroup


def context_groups(ranks: Tensor, num_context: int) -> ContextGroups:
    """Create the groups of all ranks, and return those of this rank; collective over the world.

    Args:
        ranks: the ranks of a mesh, `[..., tensor-parallel ranks]`; the dims before the last one have the data-parallel
            ranks, with the context-parallel ranks innermost.
        num_context: the number of ranks of a context-parallel group.
    """
    num_tensor = ranks.shape[-1]
    by_axis = ranks.reshape(-1, num_context, num_tensor)  # [data rank, context rank, tensor rank]
    context = _own_group(by_axis.transpose(1, 2).flatten(0, 1))
    data = _own_group(by_axis.permute(1, 2, 0).flatten(0, 1))
    return ContextGroups(context, data, context if num_tensor == 1 else _own_group(by_axis.flatten(1)))


def _own_group(ranks: Tensor) -> dist.ProcessGroup:
    """Return this rank's group, a row of `ranks` `[group, rank in the group]`; collective over the world."""
    group, _ = dist.new_subgroups_by_enumeration(ranks.tolist())
    assert isinstance(group, dist.ProcessGroup)
    return group
