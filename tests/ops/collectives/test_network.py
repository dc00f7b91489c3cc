"""Ranks in two network namespaces joined by a veth pair: two hosts as far as addresses and identities go."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("network.py")
# Namespaces and the pair between them live as long as the shell that holds them.
SETUP = """
set -e
ip link set lo up
unshare --net sleep 600 &
other=$!
for _ in $(seq 100); do
  [ "$(readlink /proc/$other/ns/net)" != "$(readlink /proc/self/ns/net)" ] && break
  sleep 0.02
done
ip link add weft0 type veth peer name weft1 netns $other
ip address add 10.87.0.1/24 dev weft0
ip link set weft0 up
nsenter --net=/proc/$other/ns/net sh -c '
  ip link set lo up; ip address add 10.87.0.2/24 dev weft1; ip link set weft1 up'
echo "$$ $other"
read -r line
kill $other
"""


@pytest.fixture(scope="module")
def networks() -> Iterator[tuple[str, str]]:
    """The pids of two processes, each in a network of its own."""
    shell = subprocess.Popen(
        ["unshare", "--net", "sh", "-c", SETUP],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    pids = shell.stdout.readline().split()
    if len(pids) != 2:
        _, errors = shell.communicate()
        pytest.skip(f"this machine lets nobody make network namespaces: {errors.strip()}")
    yield pids[0], pids[1]
    shell.communicate("end\n", timeout=30)


@pytest.mark.parametrize("hosts", ["ab", "aabb"])
def test_two_networks(networks: tuple[str, str], hosts: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("WEFT_HOST_ID", None)  # the real identity is what tells them apart
    jobs = []
    for rank, host in enumerate(hosts):
        network = networks[0] if host == "a" else networks[1]
        interface = "weft0" if host == "a" else "weft1"
        arguments = [str(rank), str(len(hosts)), "10.87.0.1", interface]
        jobs.append(
            subprocess.Popen(
                ["nsenter", f"--net=/proc/{network}/ns/net", sys.executable, str(SCRIPT), *arguments],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    seen = []
    for job in jobs:
        output, errors = job.communicate(timeout=120)
        assert job.returncode == 0, errors
        seen.append(json.loads(output))
    parts = [torch.randn(300_000, generator=torch.Generator().manual_seed(rank)) for rank in range(len(hosts))]
    # Rank by rank on each host, then host by host.
    on_first = [part for part, host in zip(parts, hosts, strict=True) if host == "a"]
    on_second = [part for part, host in zip(parts, hosts, strict=True) if host == "b"]
    expected = sum(on_first[1:], on_first[0]) + sum(on_second[1:], on_second[0])
    for result in seen:
        assert result["bits"] == expected[:5].view(torch.int32).tolist()
        assert result["sum"] == expected.view(torch.uint8).to(torch.int64).cumsum(0)[-1].item()
        assert [each["rank"] for each in result["everyone"]] == list(range(len(hosts)))
        assert len({each["network"] for each in result["everyone"]}) == 2
        assert result["received"] == [float((result["rank"] - 1) % len(hosts))] * 3
        assert result["part"] == sum(range(1, len(hosts) + 1))
