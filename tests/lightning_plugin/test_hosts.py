"""strategy="weft" on two hosts, as torchrun and SLURM start it: tensor parallelism stays inside a host."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning_plugin.scripts.plugin_models import Model, loader, set_torchrun_environment, trainer, weights

from support.networks import (
    ADDRESSES,
    INTERFACES,
    in_network_namespace,
    script_in_network_namespace,
    two_networks,
)
from support.processes import ProcessTree
from support.ranks import run_on_ranks

SCRIPT = Path(__file__).parent / "scripts" / "hosts.py"
TESTS = str(Path(__file__).resolve().parents[1])
PORT = "29475"  # free: no other process runs in the network namespaces


@pytest.fixture(scope="module")
def networks() -> Iterator[tuple[str, str]]:
    """Yield the ids of two processes, each in its own network namespace."""
    with two_networks() as pids:
        yield pids


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    [sums] = run_on_ranks(1, _one_device, folder=str(tmp_path_factory.mktemp("one")))
    return sums


def _one_device(rank: int, world_size: int, folder: str) -> dict[str, float]:
    set_torchrun_environment(rank, world_size)
    model = Model(optimizer="sgd")
    trainer(1, "auto", folder).fit(model, loader())
    return {name: value.double().sum().item() for name, value in weights(model).items()}


def _torchrun(host: int, network: str) -> list[tuple[list[str], dict[str, str]]]:
    options = ["--nnodes=2", "--nproc-per-node=2", f"--node-rank={host}"]
    options += [f"--master-addr={ADDRESSES[0]}", f"--master-port={PORT}"]
    return [([*in_network_namespace(network), sys.executable, "-m", "torch.distributed.run", *options], {})]


def _slurm(host: int, network: str) -> list[tuple[list[str], dict[str, str]]]:
    """Return the command and environment that srun gives each of two tasks on a node."""
    tasks = []
    for local in range(2):
        variables = {"JOB_ID": "17", "JOB_NAME": "train", "NTASKS": "4", "NTASKS_PER_NODE": "2", "NNODES": "2"}
        variables |= {"PROCID": str(2 * host + local), "LOCALID": str(local), "NODEID": str(host)}
        environment = {f"SLURM_{name}": value for name, value in variables.items()}
        command = script_in_network_namespace(network)
        tasks.append((command, {**environment, "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": PORT}))
    return tasks


@pytest.mark.parametrize("launcher", ["torchrun", "slurm"])
def test_two_hosts_match_one_device(
    networks: tuple[str, str], expected: dict[str, float], tmp_path: Path, launcher: str
) -> None:
    start = {"torchrun": _torchrun, "slurm": _slurm}[launcher]
    results: list[dict[str, Any]] = []
    with contextlib.ExitStack() as trees:
        jobs = []
        for host in range(2):
            for command, variables in start(host, networks[host]):
                environment = {"OMP_NUM_THREADS": "1", "WEFT_HOST_ID": "", "GLOO_SOCKET_IFNAME": INTERFACES[host]}
                environment |= {"PYTHONPATH": TESTS, **variables}
                full_command = [*command, str(SCRIPT), "2", "2", str(tmp_path)]
                warm_processes = 1 if launcher == "slurm" else 0  # torchrun starts new interpreters
                tree = ProcessTree(full_command, env=environment, warm_processes=warm_processes)
                jobs.append(trees.enter_context(tree))
        for job in jobs:
            result = job.wait(timeout=180)
            assert result.returncode == 0, result.stderr
            lines = (line.removeprefix("RESULT ") for line in result.stdout.splitlines() if "RESULT " in line)
            results += map(json.loads, lines)
    results.sort(key=lambda result: result["rank"])
    assert [result["rank"] for result in results] == [0, 1, 2, 3]
    networks_of = [result["network"] for result in results]
    assert networks_of[0] == networks_of[1] != networks_of[2] == networks_of[3]
    for result in results:
        assert result["launcher"] == {"torchrun": "TorchElasticEnvironment", "slurm": "SLURMEnvironment"}[launcher]
        assert result["mesh"] == {"data_parallel": 2, "tensor_parallel": 2}
        assert {networks_of[rank] for rank in result["tensor_group"]} == {result["network"]}
        assert result["weights"] == pytest.approx(expected, rel=1e-10)
