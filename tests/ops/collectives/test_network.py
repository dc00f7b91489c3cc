"""Ranks in two network namespaces joined by a veth pair, which simulate two hosts."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from support.networks import (
    ADDRESSES,
    INTERFACES,
    in_network_namespace,
    script_in_network_namespace,
    two_networks,
)
from support.processes import ProcessTree

SCRIPT = Path(__file__).with_name("network.py")


@pytest.fixture(scope="module")
def networks() -> Iterator[tuple[str, str]]:
    """Yield the pids of two processes in separate network namespaces."""
    with two_networks() as pids:
        yield pids


@pytest.mark.parametrize("hosts", ["ab", "aabb"])
def test_hosts_in_two_networks_communicate(networks: tuple[str, str], hosts: str) -> None:
    environment = {"OMP_NUM_THREADS": "1", "WEFT_HOST_ID": ""}  # hosts are distinguished by their real identity
    is_warm = len(hosts) > 2  # the two ranks are new interpreters
    with contextlib.ExitStack() as ranks:
        jobs = []
        for rank, host in enumerate(hosts):
            arguments = [str(rank), str(len(hosts)), ADDRESSES[0], INTERFACES["ab".index(host)]]
            network = networks["ab".index(host)]
            start = [*in_network_namespace(network), sys.executable]
            if is_warm:
                start = script_in_network_namespace(network)
            tree = ProcessTree([*start, str(SCRIPT), *arguments], env=environment, warm_processes=int(is_warm))
            jobs.append(ranks.enter_context(tree))
        seen = []
        for job in jobs:
            result = job.wait(timeout=120)
            assert result.returncode == 0, result.stderr
            seen.append(json.loads(result.stdout))
    inputs = [torch.randn(300_000, generator=torch.Generator().manual_seed(rank)) for rank in range(len(hosts))]
    # Summed in rank order on each host, then over the hosts.
    on_first = [tensor for tensor, host in zip(inputs, hosts, strict=True) if host == "a"]
    on_second = [tensor for tensor, host in zip(inputs, hosts, strict=True) if host == "b"]
    expected = sum(on_first[1:], on_first[0]) + sum(on_second[1:], on_second[0])
    for result in seen:
        assert result["bits"] == expected[:5].view(torch.int32).tolist()
        assert result["sum"] == expected.view(torch.uint8).to(torch.int64).cumsum(0)[-1].item()
        assert [each["rank"] for each in result["gathered"]] == list(range(len(hosts)))
        assert len({each["network"] for each in result["gathered"]}) == 2
        assert result["received"] == [float((result["rank"] - 1) % len(hosts))] * 3
        assert result["segment"] == sum(range(1, len(hosts) + 1))
