"""Futures of works: callbacks may wait for other collectives, and an error can be read repeatedly."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import weft
from ops.collectives.hosts import across_hosts
from support.processes import error_in_fork
from support.ranks import on_ranks


@on_ranks(2)
@across_hosts("aa", "ab")
@pytest.mark.parametrize("how", ["future", "work", "chain"])
def test_callback_waits_for_another_collective(rank: int, world_size: int, how: str) -> None:
    group = dist.new_group(backend="cpu:weft", timeout=timedelta(seconds=30))

    def all_reduce_again(first: torch.futures.Future) -> torch.Tensor:
        tensor = first.value()[0] + 1
        work = dist.all_reduce(tensor, group=group, async_op=True)
        if how == "work":
            work.wait()
            return tensor
        if how == "chain":
            return work.get_future().then(lambda future: future.value()[0]).wait()
        return work.get_future().wait()[0]

    for _ in range(50):
        work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
        assert work.get_future().then(all_reduce_again).wait().tolist() == [6.0] * 3


@on_ranks(2)
@across_hosts("aa", "ab")
def test_future_completes_with_its_work(rank: int, world_size: int) -> None:
    group = dist.new_group(backend="cpu:weft")
    for _ in range(200):
        work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
        future = work.get_future()
        work.wait()
        assert future.done()
        assert future.value()[0].tolist() == [2.0] * 3


@on_ranks(2)
def test_powersgd_keeps_ddp_replicas_equal(rank: int, world_size: int) -> None:
    """torch's hook chains three all-reduces in callbacks."""
    group = dist.new_group(backend="cpu:weft")
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 8)), process_group=group)
    state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=2, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(4):
        torch.manual_seed(10 * step + rank)
        model(torch.randn(5, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for parameter in model.parameters():
        others = [torch.empty_like(parameter) for _ in range(world_size)]
        dist.all_gather(others, parameter.detach())
        assert torch.equal(others[0], others[1])


@on_ranks(2)
@across_hosts("aa", "ab")
def test_failure_can_be_read_repeatedly(rank: int, world_size: int) -> None:
    group = dist.new_group(backend="cpu:weft", timeout=timedelta(seconds=30))
    work = dist.all_reduce(torch.ones(3 + rank), group=group, async_op=True)
    futures = [work.get_future(), work.get_future()]
    with pytest.raises(weft.CollectiveMismatchError):
        work.wait()
    assert all(future.done() for future in futures)
    for _ in range(3):
        for future in futures:
            with pytest.raises(weft.CollectiveMismatchError, match=r"rank 1 called all_reduce\(sum, float32 \[4\]\)"):
                future.wait()
            with pytest.raises(weft.CollectiveMismatchError):
                future.value()
        with pytest.raises(weft.CollectiveMismatchError):
            torch.futures.wait_all(futures)
        with pytest.raises(weft.CollectiveMismatchError):
            work.wait()


@on_ranks(2)
@across_hosts("aa", "ab")
def test_wait_for_parents_work_in_fork_raises(rank: int, world_size: int) -> None:
    group = dist.new_group(backend="cpu:weft", timeout=timedelta(seconds=30))
    received = torch.zeros(3)
    if rank == 0:
        work = dist.irecv(received, 1, group=group)
        assert "in a process forked after the group was created" in error_in_fork(work.wait)
    dist.barrier(group=group)
    if rank == 0:
        work.wait()
        assert received.tolist() == [5.0] * 3
    else:
        dist.send(torch.full((3,), 5.0), 0, group=group)
