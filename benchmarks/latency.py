"""The time of a collective after its last rank has called it, as ranks of a training arrive: weft against gloo.

    python benchmarks/latency.py --ranks 2 4 8 [--sets 20] [--json] [--check] [--pictures FOLDER]
    python benchmarks/latency.py --from latency.json [--check] [--pictures FOLDER]

Each set starts fresh ranks with one thread each and a group of each backend. A call is counted from the moment at which
its last rank begins it until the last rank has its result; all ranks of a host read the same clock. The figures are
percentiles over all calls of all sets; for `sets_within` and the spread of the medians, each set counts once. The
conditions, which a set goes through in turn with both backends in turn in each:

- back_to_back: each rank calls again as soon as it has the result;
- skewed: before each call, each rank computes for 0 to 500 microseconds, at random;
- busy: as back_to_back, while one more process computes;
- apart: as back_to_back, with the ranks pinned to the processors in turn;
- together: as back_to_back, with all ranks pinned to one processor.

`backend_all_reduce` calls the backend itself, without the Python code and the dispatcher of torch.distributed; the
other calls are those of torch.distributed.

`shared` is the share of calls for which two ranks began on the same processor, `switches` the context switches of a
rank per call, voluntary and involuntary. --check compares with the limits of latency_report.py; --from reads what
--json has printed, and measures nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import collectives
import torch
import torch.distributed as dist
from collectives import KIB, MIB
from common import machine_facts, run_on_ranks
from latency_report import BACKENDS, CONDITIONS, combine, draw, failures, print_table

from weft.strategy.affinity import run_on

SIZES = (64, 4 * KIB, 64 * KIB, 256 * KIB, 4 * MIB)
CALLS = ("backend_all_reduce", *collectives.CALLS, "broadcast", "reduce", "all_to_all", "barrier")
_MAX_SKEW_SECONDS = 500e-6
_MIN_CALLS, _MAX_CALLS = 10, 200
_sched_getcpu = ctypes.CDLL(None).sched_getcpu


def call_of(name: str, num_bytes: int, group: dist.ProcessGroup) -> Callable[[], None]:
    """Return a call of `name` whose full tensor, or whose message, has `num_bytes` of float32."""
    if name in collectives.CALLS:
        return collectives.call_of(name, num_bytes, group)
    full = torch.zeros(num_bytes // 4)
    if name == "backend_all_reduce":
        backend, options = group._get_backend(torch.device("cpu")), dist.AllreduceOptions()
        options.asyncOp = False
        return lambda: backend.allreduce([full], options).wait()
    if name == "broadcast":
        return lambda: dist.broadcast(full, 0, group=group)
    if name == "reduce":
        return lambda: dist.reduce(full, 0, group=group)
    if name == "all_to_all":
        full = full[: len(full) // dist.get_world_size() * dist.get_world_size()]
        output = torch.empty_like(full)
        return lambda: dist.all_to_all_single(output, full, group=group)
    return lambda: dist.barrier(group=group)


def measure(
    calls: list[str], sizes: list[int], conditions: list[str], seconds: float, seed: int
) -> list[dict[str, Any]]:
    """Return the rows of one set, with the microseconds of each call of each backend; collective.

    Args:
        calls: of `CALLS`; a barrier has no size, and so one row for each condition, with 0 bytes.
        seconds: the approximate time for the calls of one backend in one condition.
        seed: of the skew.
    """
    groups = {"weft": dist.new_group(backend="cpu:weft"), "gloo": dist.group.WORLD}
    skews = random.Random(f"{seed} {dist.get_rank()}")
    rows = []
    for condition in conditions:
        with _under(condition):
            for name in calls:
                for num_bytes in [0] if name == "barrier" else sizes:
                    if name != "barrier" and num_bytes // 4 < dist.get_world_size():
                        continue
                    row: dict[str, Any] = {"condition": condition, "call": name, "num_bytes": num_bytes}
                    for backend in BACKENDS if seed % 2 == 0 else reversed(BACKENDS):
                        call = call_of(name, num_bytes, groups[backend])
                        skew = skews if condition == "skewed" else None
                        num_calls = _num_calls(call, seconds, groups["weft"])
                        row[backend] = _timed(call, num_calls, skew, groups["weft"], name == "send_recv")
                    rows.append(row)
    return rows


def _num_calls(call: Callable[[], None], seconds: float, group: dist.ProcessGroup) -> int:
    for _ in range(2):
        call()
    dist.barrier(group=group)
    start = time.perf_counter()
    for _ in range(3):
        call()
    slowest = torch.tensor((time.perf_counter() - start) / 3)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    return max(_MIN_CALLS, min(_MAX_CALLS, int(seconds / slowest.item())))


def _timed(
    call: Callable[[], None],
    num_calls: int,
    skew: random.Random | None,
    group: dist.ProcessGroup,
    is_pair: bool,
) -> dict[str, Any]:
    """Return the microseconds of each call, the share of calls on shared processors, and the switches per call.

    `is_pair`: only ranks 0 and 1 communicate.
    """
    begins, ends, processors = [0] * num_calls, [0] * num_calls, [0] * num_calls
    waits = [0 if skew is None else int(skew.random() * _MAX_SKEW_SECONDS * 1e9) for _ in range(num_calls)]
    now = time.perf_counter_ns
    dist.barrier(group=group)
    before = resource.getrusage(resource.RUSAGE_SELF)
    for i in range(num_calls):
        until = now() + waits[i]
        while now() < until:
            pass
        processors[i] = _sched_getcpu()
        begins[i] = now()
        call()
        ends[i] = now()
    after = resource.getrusage(resource.RUSAGE_SELF)
    switches = [after.ru_nvcsw - before.ru_nvcsw, after.ru_nivcsw - before.ru_nivcsw]
    own = torch.tensor([*begins, *ends, *processors, *switches], dtype=torch.int64)
    of_ranks = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(of_ranks, own, group=group)
    ranks = torch.stack(of_ranks[:2] if is_pair else of_ranks)
    begin, end, processor = ranks[:, : 3 * num_calls].view(len(ranks), 3, num_calls).unbind(1)
    microseconds = (end.max(0).values - begin.max(0).values) / 1e3
    shares = [len(set(column)) < len(column) for column in processor.t().tolist()]
    return {
        "us": [round(value, 2) for value in microseconds.tolist()],
        "shared": sum(shares) / num_calls,
        "switches": (ranks[:, 3 * num_calls :].double().mean(0) / num_calls).tolist(),
    }


@contextlib.contextmanager
def _under(condition: str) -> Iterator[None]:
    """Put this rank under a condition; collective."""
    usable = os.sched_getaffinity(0)
    rank, child, parent = dist.get_rank(), 0, os.getpid()
    if condition == "apart":
        run_on({sorted(usable)[rank % len(usable)]})
    elif condition == "together":
        run_on({min(usable)})
    elif condition == "busy" and rank == 0:
        child = os.fork()
        if child == 0:
            while os.getppid() == parent:  # until it is killed
                pass
            os._exit(0)
    try:
        dist.barrier()
        yield
    finally:
        if child:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        run_on(usable)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="processes of the group, one or several")
    parser.add_argument("--sets", type=int, default=20, help="sets of fresh processes (default 20)")
    parser.add_argument("--calls", nargs="+", choices=CALLS, default=list(CALLS))
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="bytes, multiples of 4")
    parser.add_argument("--conditions", nargs="+", choices=CONDITIONS, default=list(CONDITIONS))
    parser.add_argument("--seconds", type=float, default=0.02, help="of the calls of a cell and backend (default 0.02)")
    parser.add_argument("--json", action="store_true", help="print one JSON object, not a table")
    parser.add_argument("--details", action="store_true", help="print a row for each condition, with all figures")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a limit is missed")
    parser.add_argument(
        "--pictures", type=Path, metavar="FOLDER", help="write a histogram for each number of ranks and collective"
    )
    parser.add_argument(
        "--from", type=Path, metavar="FILE", dest="source", help="a report of --json; nothing is measured"
    )
    args = parser.parse_args()
    if min(args.ranks) < 2 or args.sets < 1:
        parser.error("give --ranks of 2 or more and --sets of 1 or more.")
    if args.source is not None:
        report = json.loads(args.source.read_text())
    else:
        report = {"benchmark": "latency", "machine": machine_facts(), "num_sets": args.sets, "results": []}
        of_set = (args.calls, args.sizes, args.conditions, args.seconds)
        for num_ranks in args.ranks:
            begin = time.perf_counter()
            sets = [run_on_ranks(measure, num_ranks, *of_set, seed) for seed in range(args.sets)]
            print(f"{num_ranks} ranks: {(time.perf_counter() - begin) / args.sets:.1f} s a set", file=sys.stderr)
            report["results"] += combine(num_ranks, sets)
    if args.pictures is not None:
        draw(report["results"], args.pictures)
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        print_table(report, args.details)
    violations = failures(report["results"]) if args.check else []
    for sentence in violations:
        print(sentence, file=sys.stderr)
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
