"""Pretended networks: calls complete no earlier than on the network, with the same values."""

from __future__ import annotations

import os
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import weft
from support.ranks import on_ranks
from weft.collectives import BackendOptions, SlowNetwork

MESSAGE_SECONDS = 0.05
NETWORK = SlowNetwork(ranks_per_host=2, seconds_per_message=MESSAGE_SECONDS, bytes_per_second=1e9)


def _group(network: SlowNetwork, ranks: list[int] | None = None) -> dist.ProcessGroup:
    return dist.new_group(ranks, backend="cpu:weft", pg_options=BackendOptions(slow_network=network))


@on_ranks(4)
def test_calls_take_the_time_of_the_network(rank: int, world_size: int) -> None:
    group = _group(NETWORK)
    values = torch.full((4,), float(rank))
    start = time.monotonic()
    dist.all_reduce(values, group=group)
    assert time.monotonic() - start >= 6 * MESSAGE_SECONDS
    assert values.tolist() == [6.0] * 4

    work = dist.all_gather_into_tensor(torch.empty(16), values, group=group, async_op=True)
    assert not work.is_completed()
    start = time.monotonic()
    work.wait()
    assert work.is_completed() and time.monotonic() - start >= 2 * MESSAGE_SECONDS  # the rest has passed since

    future = dist.all_reduce(values, group=group, async_op=True).get_future()
    start = time.monotonic()
    assert future.wait()[0].tolist() == [24.0] * 4
    assert time.monotonic() - start >= 5 * MESSAGE_SECONDS

    dist.barrier(group)
    start = time.monotonic()
    if rank == 0:
        dist.send(values, 2, group=group)
    elif rank == 2:
        dist.recv(values, 0, group=group)
        assert time.monotonic() - start >= MESSAGE_SECONDS


@on_ranks(4)
def test_calls_in_flight_take_turns(rank: int, world_size: int) -> None:
    groups = _group(NETWORK), _group(NETWORK)
    start = time.monotonic()
    works = [dist.all_reduce(torch.ones(2), group=group, async_op=True) for group in groups]
    for number, work in enumerate(works, 1):
        work.wait()
        assert time.monotonic() - start >= number * 6 * MESSAGE_SECONDS


@on_ranks(4)
def test_calls_within_a_host_do_not_wait(rank: int, world_size: int) -> None:
    endless = SlowNetwork(ranks_per_host=2, seconds_per_message=1e6, bytes_per_second=1e9)
    groups = [_group(endless, ranks) for ranks in ([0, 1], [2, 3])]
    values = torch.ones(3)
    dist.all_reduce(values, group=groups[rank // 2])
    assert values.tolist() == [2.0] * 3


@on_ranks(2)
def test_environment_describes_the_network(rank: int, world_size: int) -> None:
    text = f"ranks_per_host=1,seconds_per_message={MESSAGE_SECONDS},bytes_per_second=1e9"
    with mock.patch.dict(os.environ, {"WEFT_SLOW_NETWORK": text}):
        group = dist.new_group(backend="cpu:weft")
    start = time.monotonic()
    dist.all_reduce(torch.ones(1), group=group)
    assert time.monotonic() - start >= 2 * MESSAGE_SECONDS


def test_networks_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WEFT_SLOW_NETWORK", raising=False)
    assert SlowNetwork.of_environment() is None
    monkeypatch.setenv("WEFT_SLOW_NETWORK", "ranks_per_host=2,seconds_per_message=0.05,bytes_per_second=1e9")
    assert SlowNetwork.of_environment() == NETWORK
    for text in ("fast", "ranks_per_host=2", "ranks_per_host=2,seconds_per_message=1,bytes_per_second=0"):
        monkeypatch.setenv("WEFT_SLOW_NETWORK", text)
        with pytest.raises(ValueError, match=r"WEFT_SLOW_NETWORK is '.*; set it as in 'ranks_per_host=2"):
            SlowNetwork.of_environment()
    with pytest.raises(ValueError, match="pass at least 1 rank"):
        weft.collectives.SlowNetwork(0, 0.0, 1.0)
