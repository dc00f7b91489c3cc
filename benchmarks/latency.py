"""The time of a collective after its last rank has called it, as ranks of a training arrive: weft against gloo.

    python benchmarks/latency.py --ranks 2 4 8 [--sets 20] [--json] [--check] [--pictures FOLDER]

Each set starts fresh ranks with one thread each and a group of each backend. A call is counted from the moment at which
its last rank begins it until the last rank has its result; all ranks of a host read the same clock. The figures are
percentiles over all calls of all sets; for `sets_within` and the spread of the medians, each set counts once. The
conditions, which a set goes through in turn with both backends in turn in each:

- back_to_back: each rank calls again as soon as it has the result;
- skewed: before each call, each rank computes for 0 to 500 microseconds, at random;
- busy: as back_to_back, while one more process computes;
- apart: as back_to_back, with the ranks pinned to the processors in turn;
- together: as back_to_back, with all ranks pinned to one processor.

`shared` is the share of calls for which two ranks began on the same processor, `switches` the context switches of a
rank per call, voluntary and involuntary. --check compares with the limits of this file.
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
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from collectives import CALLS, KIB, MIB, call_of
from common import machine_facts, run_on_ranks

from weft.strategy.affinity import run_on

SIZES = (64, 4 * KIB, 64 * KIB, 256 * KIB, 4 * MIB)
CONDITIONS = ("back_to_back", "skewed", "busy", "apart", "together")
BACKENDS = ("weft", "gloo")
# Limits of an all-reduce by weft, in microseconds: ranks -> condition -> bytes -> (percentile, limit).
MAX_MICROSECONDS = {
    2: {"back_to_back": {4 * KIB: (50, 15.0)}, "skewed": {4 * KIB: (50, 20.0)}, "busy": {4 * KIB: (50, 60.0)}},
    4: {"back_to_back": {4 * KIB: (50, 80.0)}, "skewed": {4 * KIB: (50, 200.0)}},
}
# Limits of a set, and the share of sets that must be within them: an all-reduce of 4 KiB on 2 ranks, back to back.
SET_LIMITS, LEAST_SHARE = {50: 15.0, 99: 60.0}, 0.95
# The least ratio of medians gloo / weft of an all-reduce, back to back and skewed: ranks -> bytes.
MIN_RATIOS = {2: {256 * KIB: 15.0, 4 * MIB: 5.0}, 4: {256 * KIB: 10.0, 4 * MIB: 4.0}}
_MAX_SKEW_SECONDS = 500e-6
_MIN_CALLS, _MAX_CALLS = 10, 200
_sched_getcpu = ctypes.CDLL(None).sched_getcpu


def measure(sizes: list[int], conditions: list[str], seconds: float, seed: int) -> list[dict[str, Any]]:
    """Return the rows of one set, with the microseconds of each call of each backend; collective.

    Args:
        seconds: the approximate time for the calls of one backend in one condition.
        seed: of the skew.
    """
    groups = {"weft": dist.new_group(backend="cpu:weft"), "gloo": dist.group.WORLD}
    skews = random.Random(f"{seed} {dist.get_rank()}")
    rows = []
    for condition in conditions:
        with _under(condition):
            for name in CALLS:
                for num_bytes in sizes:
                    if num_bytes // 4 < dist.get_world_size():
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


def percentile(values: list[float], percent: int) -> float:
    """Return the least value that `percent` % of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-percent * len(ordered) // 100) - 1)]


def combine(num_ranks: int, sets: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return, row by row, the percentiles over all calls of all sets."""
    combined = []
    for same in zip(*sets, strict=True):
        row: dict[str, Any] = {"num_ranks": num_ranks}
        row |= {name: same[0][name] for name in ("condition", "call", "num_bytes")}
        for backend in BACKENDS:
            sides = [each[backend] for each in same]
            every = [value for side in sides for value in side["us"]]
            medians = [statistics.median(side["us"]) for side in sides]
            row[backend] = {f"p{percent}": percentile(every, percent) for percent in (50, 90, 99)}
            row[backend] |= {"max": max(every), "num_calls": len(every)}
            row[backend]["medians_of_sets"] = [min(medians), max(medians)]
            row[backend]["shared"] = round(statistics.mean(side["shared"] for side in sides), 3)
            kinds = zip(*(side["switches"] for side in sides), strict=True)
            row[backend]["switches"] = [round(statistics.mean(kind), 2) for kind in kinds]
            row[backend]["histogram"] = _histogram(every)
        row["gloo_over_weft"] = round(row["gloo"]["p50"] / row["weft"]["p50"], 2)
        within = [all(percentile(each["weft"]["us"], p) <= most for p, most in SET_LIMITS.items()) for each in same]
        row["sets_within"] = [sum(within), len(within)]
        combined.append(row)
    return combined


def _histogram(microseconds: list[float]) -> dict[str, int]:
    """Return the number of calls by the lower bound of their bin, in microseconds; four bins for each factor of two."""
    counts: dict[float, int] = {}
    for value in microseconds:
        lower = 2.0 ** (torch.tensor(max(value, 0.125)).log2().mul(4).floor().item() / 4)
        counts[lower] = counts.get(lower, 0) + 1
    return {f"{lower:.3g}": counts[lower] for lower in sorted(counts)}


def failures(rows: list[dict[str, Any]]) -> list[str]:
    """Return the limits that are missed, one sentence each."""
    found = []
    for row in rows:
        if row["call"] != "all_reduce":
            continue
        ranks, condition, num_bytes = row["num_ranks"], row["condition"], row["num_bytes"]
        what = f"all_reduce of {num_bytes} bytes on {ranks} ranks, {condition}"
        limit = MAX_MICROSECONDS.get(ranks, {}).get(condition, {}).get(num_bytes)
        if limit is not None and row["weft"][f"p{limit[0]}"] > limit[1]:
            found.append(f"{what}: P{limit[0]} is {row['weft'][f'p{limit[0]}']} us, wanted at most {limit[1]:g}.")
        least = MIN_RATIOS.get(ranks, {}).get(num_bytes, 0.0) if condition in ("back_to_back", "skewed") else 0.0
        if row["gloo_over_weft"] < least:
            found.append(f"{what}: gloo / weft is {row['gloo_over_weft']}, wanted at least {least:g}.")
        num_within, num_sets = row["sets_within"]
        if (ranks, condition, num_bytes) == (2, "back_to_back", 4 * KIB) and num_within < LEAST_SHARE * num_sets:
            limits = " and ".join(f"P{percent} of {most:g} us" for percent, most in SET_LIMITS.items())
            found.append(f"{what}: {num_within} of {num_sets} sets are within {limits}, wanted {LEAST_SHARE:.0%}.")
    return found


def draw(rows: list[dict[str, Any]], folder: Path) -> None:
    """Write latency_N.svg for each number of ranks: a histogram of weft's calls for each collective and size."""
    from pictures import DASHES, PALETTE, new_pyplot, save_svg

    pyplot = new_pyplot()
    for num_ranks in sorted({row["num_ranks"] for row in rows}):
        of_ranks = [row for row in rows if row["num_ranks"] == num_ranks]
        sizes = sorted({row["num_bytes"] for row in of_ranks})
        figure, axes = pyplot.subplots(
            len(sizes), len(CALLS), figsize=(3.2 * len(CALLS), 2.0 * len(sizes)), squeeze=False, layout="constrained"
        )
        for row in of_ranks:
            axis = axes[sizes.index(row["num_bytes"])][CALLS.index(row["call"])]
            idx = CONDITIONS.index(row["condition"])
            counts = row["weft"]["histogram"]
            label = row["condition"].replace("_", " ")
            shares = [100 * count / row["weft"]["num_calls"] for count in counts.values()]
            axis.step([float(lower) for lower in counts], shares, where="post", color=PALETTE[idx], label=label)
            axis.lines[-1].set_linestyle(DASHES[idx])
            axis.set_xscale("log")
            axis.set_title(f"{row['call']}, {_size(row['num_bytes'])}", fontsize=9)
        for axis in axes[-1]:
            axis.set_xlabel("microseconds")
        for axis in axes[:, 0]:
            axis.set_ylabel("% of the calls")
        axes[0][0].legend(fontsize=7, frameon=False)
        title = f"Histograms of the microseconds of collectives on {num_ranks} ranks, by condition"
        save_svg(figure, folder / f"latency_{num_ranks}.svg", title)
        pyplot.close(figure)


def _size(num_bytes: int) -> str:
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes // unit} {name}"
    return f"{num_bytes} B"


def print_table(report: dict[str, Any]) -> None:
    """Print the rows as Markdown."""
    machine = report["machine"]
    print(f"{machine['cpu']}, {machine['cpus_usable']} cores, torch {machine['torch']}, {machine['date']}\n")
    columns = [
        "ranks",
        "call",
        "size",
        "condition",
        "P50",
        "P90",
        "P99",
        "max",
        "medians of sets",
        "shared",
        "switches",
    ]
    print(f"| {' | '.join(columns)} | gloo P50 |")
    print("|---" * (len(columns) + 1) + "|")
    for row in report["results"]:
        ours = row["weft"]
        times = " | ".join(f"{ours[name]:,.1f}" for name in ("p50", "p90", "p99", "max"))
        cells = [
            *(row["num_ranks"], row["call"], _size(row["num_bytes"]), row["condition"].replace("_", " "), times),
            f"{ours['medians_of_sets'][0]:,.1f} to {ours['medians_of_sets'][1]:,.1f}",
            f"{ours['shared']:.0%}",
            f"{ours['switches'][0]} + {ours['switches'][1]}",
            f"{row['gloo']['p50']:,.1f}",
        ]
        print(f"| {' | '.join(map(str, cells))} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="processes of the group, one or several")
    parser.add_argument("--sets", type=int, default=20, help="sets of fresh processes (default 20)")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="bytes, multiples of 4")
    parser.add_argument("--conditions", nargs="+", choices=CONDITIONS, default=list(CONDITIONS))
    parser.add_argument("--seconds", type=float, default=0.02, help="of the calls of a cell and backend (default 0.02)")
    parser.add_argument("--json", action="store_true", help="print one JSON object, not a table")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a limit is missed")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="write latency_N.svg for each number of ranks")
    args = parser.parse_args()
    if min(args.ranks) < 2 or args.sets < 1:
        parser.error("give --ranks of 2 or more and --sets of 1 or more.")
    report: dict[str, Any] = {"benchmark": "latency", "machine": machine_facts(), "num_sets": args.sets, "results": []}
    for num_ranks in args.ranks:
        of_set = (args.sizes, args.conditions, args.seconds)
        sets = [run_on_ranks(measure, num_ranks, *of_set, seed) for seed in range(args.sets)]
        report["results"] += combine(num_ranks, sets)
    if args.pictures is not None:
        draw(report["results"], args.pictures)
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        print_table(report)
    violations = failures(report["results"]) if args.check else []
    for sentence in violations:
        print(sentence, file=sys.stderr)
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
