"""Kills or stops one rank of a group in the middle of a collective and reports the survivors' errors as JSON.

    python tests/soak/faults.py --signals SIGKILL SIGSTOP --hosts aaa abb --victims 1 --repeats 1 [--check]

Prints one line for each scenario. Ranks are forked from this process, which has only imported torch. With --check it
prints all problems and exits with 1 if there are any. Problems of a survivor: it ends with an error, or gets an error
of a wrong class or with the name of a wrong rank. Problems on one host, if they occur in more than one case of twenty:
a survivor needs more than NOTICED_WITHIN to notice a killed rank, or more than DESTROYED_WITHIN to destroy the group.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from ops.collectives.calls import DATA_MOVEMENTS, REDUCTIONS, Call

import weft

STOP_TIMEOUT = timedelta(seconds=1)  # of a group with a stopped rank, which only a time-out detects
KILL_TIMEOUT = timedelta(seconds=60)  # of a group with a killed rank; no survivor may reach it
NOTICED_WITHIN = DESTROYED_WITHIN = 0.1  # seconds


def barrier(group: dist.ProcessGroup, rank: int, world_size: int, make: Callable[..., torch.Tensor]) -> list:
    dist.barrier(group=group)
    return []


def large_all_reduce(group: dist.ProcessGroup, rank: int, world_size: int, make: Callable[..., torch.Tensor]) -> list:
    """Reduce many chunks, so that the signal arrives during the collective."""
    dist.all_reduce(torch.ones(4_000_000), group=group)
    return []


def asynchronous(group: dist.ProcessGroup, rank: int, world_size: int, make: Callable[..., torch.Tensor]) -> list:
    works = [dist.all_reduce(torch.ones(1000), group=group, async_op=True) for _ in range(4)]
    for work in works:
        work.wait()
    return []


CALLS: dict[str, Call] = {
    **DATA_MOVEMENTS,
    **{name: reduction("SUM") for name, reduction in REDUCTIONS.items()},
    "barrier": barrier,
    "large_all_reduce": large_all_reduce,
    "asynchronous": asynchronous,
}


def run_rank(folder: Path, call: str, rank: int, world_size: int, host: str, timeout: timedelta) -> None:
    """Repeat the call until it fails, then write the error to `folder`."""
    torch.set_num_threads(1)
    os.environ["WEFT_HOST_ID"] = host
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("cpu:weft", store=store, rank=rank, world_size=world_size, timeout=timeout)
    group = dist.group.WORLD
    dist.barrier()
    (folder / f"ready-{rank}").touch()
    try:
        while True:
            CALLS[call](group, rank, world_size, lambda key, *shape: torch.ones(shape))
    except weft.CollectiveError as error:
        failed_at = time.monotonic()
        seen = {"error": type(error).__name__, "text": str(error), "time": failed_at}
    try:
        dist.all_reduce(torch.ones(1))
    except weft.CollectiveError as error:
        seen["again"] = type(error).__name__
    started = time.monotonic()
    dist.destroy_process_group()
    seen["destroy_seconds"] = time.monotonic() - started
    (folder / f"seen-{rank}").write_text(json.dumps(seen))


def fork_rank(*arguments: object) -> int:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            run_rank(*arguments)  # type: ignore[arg-type]
            status = 0
        except BaseException as error:
            print(f"rank failed: {error!r}", file=sys.stderr, flush=True)
        os._exit(status)
    return pid


def run_scenario(call: str, signal_name: str, hosts: str, victim: int, delay: float) -> dict:
    """Run one scenario. Return it with `ranks`: each survivor's error and its time, `seconds` after the signal."""
    world_size = len(hosts)
    stops = signal_name == "SIGSTOP"
    with tempfile.TemporaryDirectory(prefix="weft-faults-") as name:
        folder = Path(name)
        timeout = STOP_TIMEOUT if stops else KILL_TIMEOUT
        pids = [fork_rank(folder, call, rank, world_size, hosts[rank], timeout) for rank in range(world_size)]
        while len(list(folder.glob("ready-*"))) < world_size:
            time.sleep(0.002)
        time.sleep(delay)
        sent_at = time.monotonic()
        os.kill(pids[victim], signal.Signals[signal_name])
        statuses = {}
        for rank, pid in enumerate(pids):
            if rank != victim:
                statuses[rank] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if stops:
            os.kill(pids[victim], signal.SIGKILL)
        os.waitpid(pids[victim], 0)
        ranks = {}
        for rank, status in statuses.items():
            seen = json.loads((folder / f"seen-{rank}").read_text()) if status == 0 else {}
            ranks[rank] = {**seen, "status": status, "seconds": seen.pop("time", sent_at) - sent_at}
    return {
        "call": call,
        "signal": signal_name,
        "hosts": hosts,
        "victim": victim,
        "victim_pid": pids[victim],
        "ranks": ranks,
    }


def names_victim(scenario: dict, text: str) -> bool:
    """Return whether `text` names the victim. On another host, the text may have its global rank or no pid."""
    victim, pid = scenario["victim"], scenario["victim_pid"]
    if len(set(scenario["hosts"])) == 1:
        return f"rank {victim} (pid {pid})" in text
    return (
        f"rank {victim} (pid {pid})" in text
        or f"global rank {victim}, pid {pid}" in text
        or (f"rank {victim} (on another host)" in text)
    )


def _late_ranks(text: str) -> str:
    return text.partition("not arrived")[2]


def problems_of(scenario: dict) -> list[str]:
    """Return the errors that the survivors of a scenario should not have seen."""
    expected = "PeerLostError" if scenario["signal"] == "SIGKILL" else "CollectiveTimeoutError"
    where = f"{scenario['call']} on {scenario['hosts']}, {scenario['signal']} to rank {scenario['victim']}"
    problems = []
    for rank, seen in scenario["ranks"].items():
        if seen["status"] != 0:
            problems.append(f"{where}: rank {rank} ended with {seen['status']}")
        elif not seen["error"] == seen["again"] == expected:
            problems.append(f"{where}: rank {rank} got {seen['error']}, then {seen['again']}, not {expected}")
        elif expected == "CollectiveTimeoutError" and scenario["call"] == "send_recv":
            continue  # its text names the peer of the late message instead
        elif not names_victim(scenario, _late_ranks(seen["text"]) if expected != "PeerLostError" else seen["text"]):
            problems.append(f"{where}: rank {rank} got no name of the victim: {seen['text']}")
    return problems


def slow_of(scenarios: list[dict]) -> list[str]:
    """Return the durations on one host that exceed their limit in more than one case of twenty."""
    seen = [
        (scenario["signal"], each)
        for scenario in scenarios
        if len(set(scenario["hosts"])) == 1
        for each in scenario["ranks"].values()
        if each["status"] == 0
    ]
    times = {
        "a killed rank was noticed after": (
            [each["seconds"] for sig, each in seen if sig == "SIGKILL"],
            NOTICED_WITHIN,
        ),
        "a group was destroyed after": ([each["destroy_seconds"] for _, each in seen], DESTROYED_WITHIN),
    }
    return [
        f"{what} {sorted(seconds)[len(seconds) * 19 // 20]:.3f} s or more in one case of twenty, limit {limit} s"
        for what, (seconds, limit) in times.items()
        if seconds and sorted(seconds)[len(seconds) * 19 // 20] > limit
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--signals", nargs="+", default=["SIGKILL", "SIGSTOP"])
    parser.add_argument("--calls", nargs="+", default=list(CALLS))
    parser.add_argument(
        "--hosts", nargs="+", default=["aaa"], help="groups, each a string with a letter for the host of each rank"
    )
    parser.add_argument("--victims", nargs="+", type=int, help="ranks to kill or stop; default: each in turn")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    scenarios = []
    rng = random.Random(20261121)
    for _ in range(args.repeats):
        for hosts in args.hosts:
            for call in args.calls:
                for signal_name in args.signals:
                    for victim in args.victims or range(len(hosts)):
                        scenario = run_scenario(call, signal_name, hosts, victim, rng.uniform(0.0, 0.03))
                        print(json.dumps(scenario), flush=True)
                        scenarios.append(scenario)
    if args.check:
        problems = [problem for scenario in scenarios for problem in problems_of(scenario)] + slow_of(scenarios)
        print("\n".join(problems) or f"{len(scenarios)} scenarios, nothing wrong", file=sys.stderr)
        sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
