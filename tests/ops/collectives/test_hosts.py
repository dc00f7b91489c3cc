"""Multi-host groups, except for their values, which test_values.py checks."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import weft
from ops.collectives.hosts import across_hosts
from support.ranks import on_ranks

gloo = weft.collectives.BackendOptions().transport


def transport_calls(rank: int) -> list[tuple[int, int, timedelta]]:
    """Create a group, and return the arguments with which it calls BackendOptions.transport."""
    calls: list[tuple[int, int, timedelta]] = []

    def transport(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.distributed_c10d.Backend:
        calls.append((rank, size, timeout))
        return gloo(store, rank, size, timeout)

    options = weft.collectives.BackendOptions(transport=transport)
    group = dist.new_group(backend="cpu:weft", pg_options=options, timeout=timedelta(seconds=77))
    tensor = torch.full((5,), rank + 1.0)
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [6.0] * 5
    return calls


@on_ranks(3)
@across_hosts("aba")
def test_options_create_transport(rank: int, world_size: int) -> None:
    assert transport_calls(rank) == [(rank, world_size, timedelta(seconds=77))]


@on_ranks(3)
def test_one_host_needs_no_transport(rank: int, world_size: int) -> None:
    assert transport_calls(rank) == []


@on_ranks(3)
@across_hosts("aab")
def test_transport_without_abort_is_supported(rank: int, world_size: int) -> None:
    """With a transport whose works cannot be aborted, the group still works, fails and is destroyed."""

    def weft_on_one_host(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.distributed_c10d.Backend:
        saved_host = os.environ["WEFT_HOST_ID"]
        os.environ["WEFT_HOST_ID"] = "all"
        try:
            return weft._collectives.make_backend(store, rank, size, timeout, "between", [], 1 << 24, gloo)
        finally:
            os.environ["WEFT_HOST_ID"] = saved_host

    options = weft.collectives.BackendOptions(transport=weft_on_one_host)
    group = dist.new_group(backend="cpu:weft", pg_options=options, timeout=timedelta(seconds=60))
    tensor = torch.full((70_000,), rank + 1.0)
    dist.all_reduce(tensor, group=group)
    assert tensor.eq(6.0).all()
    dist.broadcast(tensor, 0, group=group)
    if rank == 2:
        group.abort()
    with pytest.raises(weft.GroupAbortedError, match="rank 2 aborted"):
        dist.all_reduce(tensor, group=group)


@on_ranks(2)
@across_hosts("ab")
def test_store_is_reusable(rank: int, world_size: int) -> None:
    """Neither the failure of an earlier group nor its ranks' addresses in the store disturb a new one."""
    store = dist.PrefixStore("again", dist.distributed_c10d._get_default_store())
    for attempt in range(3):
        backend = weft._collectives.make_backend(
            store, rank, world_size, timedelta(seconds=60), "again", [], 1 << 24, gloo
        )
        tensor = torch.full((3,), float(attempt))
        backend.allreduce([tensor], dist.AllreduceOptions()).wait()
        assert tensor.tolist() == [2.0 * attempt] * 3
        dist.barrier()
        backend.abort()
        with pytest.raises(weft.GroupAbortedError, match=r"rank \d aborted group 'again'"):
            backend.allreduce([tensor], dist.AllreduceOptions()).wait()
        dist.barrier()
        del backend


@on_ranks(2)
@across_hosts("ab")
def test_too_large_tag_raises(rank: int, world_size: int) -> None:
    group = dist.new_group(backend="cpu:weft")
    with pytest.raises(ValueError, match=r"got tag 2147483647 in a multi-host group; pass one from 0 to"):
        dist.isend(torch.ones(1), 1 - rank, group=group, tag=2**31 - 1)
    dist.barrier(group=group)


@on_ranks(2)
@across_hosts("ab")
def test_transport_without_backend_raises(rank: int, world_size: int) -> None:
    for returned in (None, print):
        options = weft.collectives.BackendOptions(transport=lambda *_, returned=returned: returned)
        with pytest.raises(RuntimeError, match=r"got .* from BackendOptions\.transport; return a backend"):
            dist.new_group(backend="cpu:weft", pg_options=options)


@on_ranks(3)
@across_hosts("aab", "aba")
def test_wait_timeout_names_late_rank(rank: int, world_size: int) -> None:
    group = dist.new_group(backend="cpu:weft", timeout=timedelta(seconds=60))
    store = dist.PrefixStore(f"late in {group.group_name}", dist.distributed_c10d._get_default_store())
    if rank != 2:
        work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
        with pytest.raises(weft.CollectiveTimeoutError, match=r"not arrived rank (2|1 \(global rank 2)"):
            work.wait(timedelta(seconds=1))
        store.add("waited", 1)
        return
    while store.add("waited", 0) < 2:
        time.sleep(0.01)
    with pytest.raises(weft.CollectiveTimeoutError):
        dist.all_reduce(torch.ones(3), group=group)


@on_ranks(3)
@across_hosts("aab", "abc")
def test_departed_rank_is_reported(rank: int, world_size: int) -> None:
    group = dist.new_group(backend="cpu:weft", timeout=timedelta(seconds=60))
    dist.barrier(group=group)
    if rank == 2:
        dist.destroy_process_group(group)
        return
    with pytest.raises(weft.PeerLostError, match="left the group"):
        dist.barrier(group=group)
