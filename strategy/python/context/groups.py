"""The process groups of context parallelism, whose ranks are the innermost ones of the axis data_parallel."""

from __future__ import annotations

import contextlib
import math
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from weft.nn.shard import process_group


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


class Grid(NamedTuple):
    """A context-parallel group as a grid: groups of neighbouring ranks exchange heads, and a ring joins the groups.

    num_ulysses: the number of ranks that exchange heads.
    ulysses_group_name: c10d name of this rank's group of them; "" if it is alone.
    ring_group_name: c10d name of the ranks with the same place in their groups; "" if there is one group.
    """

    num_ulysses: int
    ulysses_group_name: str
    ring_group_name: str

    def takes(self, num_heads: int, num_kv_heads: int) -> bool:
        """Return whether the ranks that exchange heads divide the query heads and the key/value heads."""
        return math.gcd(num_heads, num_kv_heads) % self.num_ulysses == 0


_grids: WeakKeyDictionary[dist.ProcessGroup, tuple[Grid, ...]] = WeakKeyDictionary()


def grids_of(group: dist.ProcessGroup) -> tuple[Grid, ...]:
    """Return the grids of a group, one for each divisor of its number of ranks, that with most `num_ulysses` first.

    The first call creates two process groups for each divisor but 1 and the number of ranks, because the heads of
    layers are not known yet; all ranks of `group` must make it. Later calls return the same grids.

    Raises:
        ValueError: the ranks of the group are not in ascending order, as new groups are.
    """
    found = _grids.get(group)
    if found is None or not all(_exists(name) for grid in found for name in grid[1:] if name):
        found = _grids[group] = _new_grids(group)
    return found


def _new_grids(group: dist.ProcessGroup) -> tuple[Grid, ...]:
    ranks, num_ranks = dist.get_process_group_ranks(group), group.size()
    if ranks != sorted(ranks):
        raise ValueError(
            f"parallelize_context got a group with the ranks {ranks} and attention='ring_ulysses', whose groups are in "
            "ascending order; pass a group with its ranks in ascending order."
        )
    grids = [Grid(num_ranks, group.group_name, "")]
    for num_ulysses in range(num_ranks // 2, 1, -1):
        if num_ranks % num_ulysses == 0:
            grid = torch.tensor(ranks, device="cpu").view(-1, num_ulysses)
            grids.append(Grid(num_ulysses, _new_group(grid, group), _new_group(grid.T, group)))
    return (*grids, Grid(1, "", group.group_name))


def _new_group(ranks: Tensor, parent: dist.ProcessGroup) -> str:
    """Create this rank's group, a row of `ranks`; return its name. Only the ranks of `parent` must call this."""
    [own] = [row for row in ranks.tolist() if dist.get_rank() in row]
    made = dist.new_group(own, backend=dist.get_backend_config(parent), use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)
    return made.group_name


def _exists(group_name: str) -> bool:
    with contextlib.suppress(RuntimeError, ValueError):
        return process_group(group_name) is not None
    return False
