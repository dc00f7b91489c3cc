"""Profiler events of messages and sparse all-reduces have the names and shapes of gloo's."""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import weft  # noqa: F401  (registers the backend)
from ops.collectives.hosts import across_hosts
from support.ranks import on_ranks


def run_calls(group: dist.ProcessGroup, rank: int, world_size: int) -> None:
    """Send to each rank, twice, and receive from each, once from any rank; then all-reduce a sparse tensor."""
    for receiver in range(world_size):
        for sender in range(world_size):
            if rank == sender != receiver:
                dist.send(torch.ones(receiver + 1, 2), receiver, group=group)
                dist.isend(torch.ones(5), receiver, group=group, tag=1).wait()
            elif rank == receiver != sender:
                dist.recv(torch.empty(receiver + 1, 2), sender, group=group)
                dist.recv(torch.empty(5), group=group, tag=1)
    dist.all_reduce(torch.eye(4).to_sparse(), group=group)


@on_ranks(3)
@across_hosts("aaa", "aab")
def test_events_equal_gloo(rank: int, world_size: int) -> None:
    events: dict[str, Counter[tuple[str, str]]] = {}
    for backend in ("gloo", "weft"):
        group = dist.new_group(backend="cpu:weft" if backend == "weft" else backend)
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
            run_calls(group, rank, world_size)
        own = [event for event in profiler.events() if event.name.startswith(f"{backend}:") and "::" not in event.name]
        assert all(event.is_async for event in own)
        events[backend] = Counter((event.name.partition(":")[2], str(event.input_shapes)) for event in own)
    assert events["weft"] == events["gloo"]
    names = {name for name, _ in events["weft"]}
    assert names == {"send", "recv", "recvAnySource", "sparse_all_reduce"}
    assert sum(events["weft"].values()) == 4 * (world_size - 1) + 1
