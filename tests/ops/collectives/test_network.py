"""Ranks in two network namespaces joined by a veth pair: two hosts as far as addresses and identities go."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from support.processes import ProcessTree, run_process

SCRIPT = Path(__file__).with_name("network.py")
# Namespaces and the pair between them live as long as the shell that holds them.
SETUP = """
set -e
ip link set lo up
unshare --net sleep 600 &
other=$!
trap 'kill $other' EXIT
for _ in $(seq 100); do
  [ "$(readlink /proc/$other/ns/net)" != "$(readlink /proc/self/ns/net)" ] && break
  sleep 0.02
done
ip link add weft0 type veth peer name weft1 netns $other
ip address add 10.87.0.1/24 dev weft0
ip link set weft0 up
nsenter --net=/proc/$other/ns/net sh -c '
  ip link set lo up; ip address add 10.87.0.2/24 dev weft1; ip link set weft1 up'
echo "networks of $$ $other"
wait $other
"""


def why_there_are_no_namespaces() -> str:
    """Why this machine lets nobody make a network namespace; empty where it does."""
    missing = [tool for tool in ("ip", "unshare", "nsenter") if shutil.which(tool) is None]
    if missing:
        return f"no {' and no '.join(missing)}"
    attempt = run_process(["unshare", "--net", "true"])
    return attempt.stderr.strip() if attempt.returncode != 0 else ""


@pytest.fixture(scope="module")
def networks() -> Iterator[tuple[str, str]]:
    """The pids of two processes, each in a network of its own."""
    if why := why_there_are_no_namespaces():
        pytest.skip(f"needs network namespaces: {why}")
    with ProcessTree(["unshare", "--net", "sh", "-c", SETUP]) as tree:
        pids = tree.wait_for_text("networks of").split()[-2:]
        yield pids[0], pids[1]


@pytest.mark.parametrize("hosts", ["ab", "aabb"])
def test_two_networks(networks: tuple[str, str], hosts: str) -> None:
    environment = {"OMP_NUM_THREADS": "1", "WEFT_HOST_ID": ""}  # the real identity is what tells them apart
    with contextlib.ExitStack() as ranks:
        jobs = []
        for rank, host in enumerate(hosts):
            network = networks[0] if host == "a" else networks[1]
            interface = "weft0" if host == "a" else "weft1"
            arguments = [str(rank), str(len(hosts)), "10.87.0.1", interface]
            command = ["nsenter", f"--net=/proc/{network}/ns/net", sys.executable, str(SCRIPT), *arguments]
            jobs.append(ranks.enter_context(ProcessTree(command, env=environment)))
        seen = []
        for job in jobs:
            result = job.wait(timeout=120)
            assert result.returncode == 0, result.stderr
            seen.append(json.loads(result.stdout))
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
