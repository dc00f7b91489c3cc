"""Computes the shard of a dim that a rank holds; looks up groups by name."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def shard_range(dim_size: int, num_ranks: int, rank: int) -> tuple[int, int]:
    """Return (start, length) of a rank's shard of a dim, divided as by torch.chunk and by DTensor's Shard.

    Shards are ceil(dim_size / num_ranks) long; later ranks get a shorter shard or an empty one.
    """
    length = -(-dim_size // num_ranks)
    start = min(rank * length, dim_size)
    return start, min(start + length, dim_size) - start


def group_size_and_rank(group_name: str) -> tuple[int, int]:
    """Return (number of ranks, this process's rank) of a c10d group by its name; (1, 0) for "", the group of one."""
    if not group_name:
        return 1, 0
    group = process_group(group_name)
    return group.size(), group.rank()


def process_group(group_name: str) -> dist.ProcessGroup:
    """Return the c10d group with this name."""
    name: Any = group_name  # Any, because torch declares the NewType GroupName
    return dist.distributed_c10d._resolve_process_group(name)  # there is no public API for this
