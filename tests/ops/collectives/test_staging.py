"""The number of shared memory pages that collectives write."""

from __future__ import annotations

import torch
import torch.distributed as dist

import weft  # noqa: F401  (registers the backend)
from ops.memory.counting import counted
from support.ranks import on_ranks


@on_ranks(2, 3)
def test_reduce_scatter_reuses_all_gather_pages(world_size: int) -> None:
    """A reduce-scatter stages its segments for other ranks from the offset of an all-gather's segment, contiguously."""
    group = dist.new_group(backend="cpu:weft")
    shard = torch.ones(1 << 15)
    full = shard.new_ones(world_size << 15)
    with counted() as count:
        for _ in range(2):  # once for each of the two alternating buffers
            dist.all_gather_into_tensor(full, shard, group=group)
        gathered = count.now("communication")
        assert gathered == 2 * shard.nbytes
        for _ in range(2):
            dist.reduce_scatter_tensor(shard, full, group=group)
        assert count.now("communication") - gathered == 2 * shard.nbytes * (world_size - 2)
