"""Ranks that die, stop, fork, or share the machine with another job, in real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from soak.faults import problems_of, slow_of

import weft
from ops.collectives.hosts import across_hosts
from support.processes import error_in_fork
from support.ranks import on_ranks

TESTS = Path(__file__).parents[2]
PYTHONPATH = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHONPATH}


def run_faults(*arguments: str) -> list[dict]:
    command = [sys.executable, str(TESTS / "soak" / "faults.py"), *arguments]
    result = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def _shared_memory() -> set[str]:
    """Return the names in /dev/shm but those of semaphores, which multiprocessing makes in other tests meanwhile."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}


@pytest.fixture(scope="module")
def scenarios() -> list[dict]:
    """Return the results of killing and stopping rank 1 of 3 in each collective, and in some rank 0 or on two hosts."""
    before = _shared_memory()
    found = run_faults("--victims", "1") + run_faults("--victims", "0", "--calls", "all_reduce", "broadcast")
    found += run_faults("--hosts", "abb", "--calls", "all_reduce", "scatter", "send_recv")
    # Large messages are in flight between the hosts when the rank dies; gloo alone missed one death in four.
    large = ("--calls", "large_all_reduce", "--signals", "SIGKILL", "--victims", "0", "--repeats", "8")
    found += run_faults("--hosts", "abb", *large)
    assert _shared_memory() == before
    return found


def test_killed_rank_is_named(scenarios: list[dict]) -> None:
    killed = [scenario for scenario in scenarios if scenario["signal"] == "SIGKILL"]
    assert len(killed) >= 24
    for scenario in killed:
        assert problems_of(scenario) == []
        for seen in scenario["ranks"].values():
            assert "while rank" in seen["text"], scenario


def test_stopped_rank_is_named(scenarios: list[dict]) -> None:
    stopped = [scenario for scenario in scenarios if scenario["signal"] == "SIGSTOP"]
    assert len(stopped) >= 24
    for scenario in stopped:
        assert problems_of(scenario) == []
        for seen in scenario["ranks"].values():
            assert "timed out after 1 s" in seen["text"], scenario


def test_soak_reports_problems(scenarios: list[dict]) -> None:
    killed = next(scenario for scenario in scenarios if scenario["signal"] == "SIGKILL")
    for change in ({"status": 1}, {"error": "GroupAbortedError"}, {"again": None}, {"text": "rank 7 (pid 1)"}):
        ranks = {"0": killed["ranks"]["0"] | change}
        assert len(problems_of(killed | {"ranks": ranks})) == 1
    late = killed["ranks"]["0"] | {"seconds": 0.5, "destroy_seconds": 0.5}
    assert len(slow_of([killed | {"hosts": "aaa", "ranks": {"0": late}}])) == 2


@on_ranks(2)
@across_hosts("aa", "ab")
def test_fork_does_not_disturb_group(rank: int, world_size: int) -> None:
    """A child cannot use its parent's group, and neither its work nor its exit disturbs the group."""
    group = dist.new_group(backend="cpu:weft")
    work = dist.all_reduce(torch.ones(10), group=group, async_op=True)  # starts the background thread
    work.wait()
    text = error_in_fork(lambda: dist.all_reduce(torch.ones(3), group=group))
    assert text.startswith("RuntimeError: weft: got a call on group"), text
    assert "in a process forked after the group was created" in text
    assert error_in_fork(lambda: dist.destroy_process_group(group)) == ""
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [2.0] * 3
    loader = torch.utils.data.DataLoader(list(range(8)), num_workers=1, multiprocessing_context="fork")
    assert len(list(loader)) == 8


JOB = """
import sys, tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
import weft

def run(rank, path, seed):
    torch.set_num_threads(1)
    store = dist.FileStore(path, 2)
    dist.init_process_group("cpu:weft", store=store, rank=rank, world_size=2)
    for step in range(300):
        tensor = torch.full((1 + 37 * step,), float(seed + rank))
        dist.all_reduce(tensor)
        assert torch.equal(tensor, torch.full_like(tensor, 2.0 * seed + 1)), (step, tensor)
    if sys.argv[2] == "keep":
        return  # ends without destroying the group
    dist.destroy_process_group()
    # The first group's keys in the store must not disturb a second group.
    dist.init_process_group("cpu:weft", store=store, rank=rank, world_size=2)
    dist.barrier()
    dist.destroy_process_group()

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run, (folder + "/store", int(sys.argv[1])), nprocs=2, start_method="fork")
"""


def test_two_jobs_on_one_machine_are_independent(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(JOB)
    jobs = [
        subprocess.Popen(
            [sys.executable, str(script), str(seed), how], env=ENVIRONMENT, stderr=subprocess.PIPE, text=True
        )
        for seed, how in ((3, "destroy"), (500, "keep"))
    ]
    for job in jobs:
        _, errors = job.communicate(timeout=120)
        assert job.returncode == 0, errors
        assert "Error" not in errors and "terminate" not in errors, errors


@on_ranks(2)
@across_hosts("aa", "ab")
def test_abort_and_destroy_fail_pending_calls(rank: int, world_size: int) -> None:
    """An abort fails pending calls at once; so does destroying a group that other ranks still use."""
    group = dist.new_group(backend="cpu:weft")
    if rank == 0:
        with pytest.raises(weft.GroupAbortedError, match="rank 1 aborted group"):
            dist.all_reduce(torch.ones(3), group=group)
    else:
        group._get_backend(torch.device("cpu")).abort()
    group = dist.new_group(backend="cpu:weft")
    if rank == 0:
        # Between hosts, the departure is detected as a closed connection.
        text = r"rank 1 \(.*\) of group '.*' (left the group|was lost) while rank 0"
        with pytest.raises(weft.PeerLostError, match=text):
            dist.all_reduce(torch.ones(3), group=group)
    else:
        dist.destroy_process_group(group)
    dist.barrier()


@on_ranks(2)
def test_call_timeout_names_late_rank(rank: int, world_size: int) -> None:
    from datetime import timedelta

    group = dist.new_group(backend="cpu:weft", timeout=timedelta(seconds=60))
    if rank == 0:
        work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
        with pytest.raises(weft.CollectiveTimeoutError, match=r"timed out after 0.2 s on rank 0.*not arrived rank 1"):
            work.wait(timedelta(seconds=0.2))
    dist.barrier()  # on the default group: rank 1 makes its call on `group` only afterwards
    if rank == 1:
        with pytest.raises(weft.CollectiveTimeoutError, match="not arrived rank 1"):
            dist.all_reduce(torch.ones(3), group=group)


@on_ranks(2)
@across_hosts("aa", "ab")
def test_timeout_of_zero_passes_at_once(rank: int, world_size: int) -> None:
    """It is not the timeout of the group, which would pass after a minute."""
    from datetime import timedelta

    group = dist.new_group(backend="cpu:weft", timeout=timedelta(seconds=60))
    if rank == 0:
        with pytest.raises(weft.CollectiveTimeoutError, match=r"timed out after 0\.001 s on rank 0.*rank 1"):
            group.monitored_barrier(timedelta(0))
    dist.barrier()
