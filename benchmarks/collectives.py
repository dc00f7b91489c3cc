"""Collectives of CPU tensors: the backend weft against gloo, in the same processes, in turn.

    python benchmarks/collectives.py --ranks 2 4 8 [--json] [--check] [--runs 5]

Each run starts fresh ranks with one thread each, creates a group of each backend, and takes samples of both in turn
after a barrier; a sample counts its slowest rank. A run's figure is the median of its samples; the median of the runs
is reported. An all-reduce is also compared with copies. In `memcpy` all ranks copy a tensor of its size at the same
time: no all-reduce can read its input and write its result faster. But a rank that shares its processor with others
makes many copies in one time slice, with the caches to itself. So `memcpy_in_step` has a barrier after each copy, to
synchronize the ranks as a collective does. A reduce-scatter is also compared with weft's all-reduce of as many bytes;
their samples are taken in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from common import interleaved_seconds, machine_facts, run_on_ranks

import weft  # noqa: F401  (registers the backend)

KIB, MIB = 1024, 1024 * 1024
SIZES = (4 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 32 * MIB)
CALLS = ("all_reduce", "reduce_scatter", "all_gather", "send_recv")
# The least ratio of seconds gloo / weft that --check requires: number of ranks -> call -> size -> ratio.
_MIN_RATIOS_ABOVE_TWO_RANKS = {
    "all_reduce": {4 * KIB: 15.0, 256 * KIB: 15.0, 4 * MIB: 4.0},
    "all_gather": {256 * KIB: 5.0},
    "send_recv": {256 * KIB: 5.0},
}
MIN_RATIOS = {
    2: {**_MIN_RATIOS_ABOVE_TWO_RANKS, "all_reduce": {4 * KIB: 20.0, 256 * KIB: 15.0, 4 * MIB: 5.0}},
    4: _MIN_RATIOS_ABOVE_TWO_RANKS,
    8: _MIN_RATIOS_ABOVE_TWO_RANKS,
}
MAX_REDUCE_SCATTER = {"small": 1.1, "large": 0.8}  # relative to weft's all-reduce; large is from 1 MiB up
MAX_MEMCPY = 3.0  # all-reduce of 4 MiB relative to memcpy_in_step; if each rank has a processor, also to memcpy
_SAMPLE_SECONDS = 0.03  # approximately
_NUM_SAMPLES = 7


def call_of(name: str, num_bytes: int, group: dist.ProcessGroup) -> Callable[[], None]:
    """Return a call of `name` whose full tensor, or whose message, has `num_bytes` of float32."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    full = torch.zeros(num_bytes // 4)
    shard = torch.zeros(num_bytes // 4 // num_ranks)
    if name == "all_reduce":
        return lambda: dist.all_reduce(full, group=group)
    if name == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(shard, full, group=group)
    if name == "all_gather":
        return lambda: dist.all_gather_into_tensor(full, shard, group=group)

    def ping_pong() -> None:
        """Send from rank 0 to rank 1 and back; other ranks do nothing. The time includes both messages."""
        if rank == 0:
            dist.send(full, 1, group=group)
            dist.recv(full, 1, group=group)
        elif rank == 1:
            dist.recv(full, 0, group=group)
            dist.send(full, 0, group=group)

    return ping_pong


def _copy_in_step(target: torch.Tensor, source: torch.Tensor, group: dist.ProcessGroup) -> None:
    target.copy_(source)
    dist.barrier(group=group)


def measure(sizes: list[int]) -> list[dict[str, Any]]:
    """Return the rows of one run, with the median seconds per call of each side; collective."""
    groups = {"gloo": dist.group.WORLD, "weft": dist.new_group(backend="cpu:weft")}
    rows = []
    for name in CALLS:
        for num_bytes in sizes:
            candidates = {backend: call_of(name, num_bytes, group) for backend, group in groups.items()}
            if name == "all_reduce":
                source, target = torch.zeros(num_bytes // 4), torch.ones(num_bytes // 4)
                candidates["memcpy"] = lambda source=source, target=target: target.copy_(source)
                candidates["memcpy_in_step"] = partial(_copy_in_step, target, source, groups["weft"])
            if name == "reduce_scatter":
                candidates["all_reduce"] = call_of("all_reduce", num_bytes, groups["weft"])
            # weft's barrier for both: ranks leave gloo's up to milliseconds apart, which would distort short calls.
            timed = partial(interleaved_seconds, candidates, barrier=partial(dist.barrier, group=groups["weft"]))
            trial = timed(num_samples=1, calls_per_sample=5, warm_up=3)
            # At least five calls, because the ranks do not leave the barrier at exactly the same time.
            calls = {side: max(5, min(500, int(_SAMPLE_SECONDS / times[0]))) for side, times in trial.items()}
            seconds = timed(num_samples=_NUM_SAMPLES, calls_per_sample=calls, warm_up=0)
            rows.append({"call": name, "num_bytes": num_bytes})
            rows[-1] |= {side: statistics.median(times) for side, times in seconds.items()}
    return rows


def combine(num_ranks: int, runs: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return, row by row, the medians over the runs: of the times, and of each run's ratios."""
    combined = []
    for same in zip(*runs, strict=True):
        row: dict[str, Any] = {"num_ranks": num_ranks, "call": same[0]["call"], "num_bytes": same[0]["num_bytes"]}
        for side in ("weft", "gloo", "memcpy", "memcpy_in_step"):
            if side in same[0]:
                row[f"{side}_us"] = round(statistics.median(run[side] for run in same) * 1e6, 1)
        row["gloo_over_weft"] = round(statistics.median(run["gloo"] / run["weft"] for run in same), 2)
        for side, digits in (("memcpy", 2), ("memcpy_in_step", 2), ("all_reduce", 3)):
            if side in same[0]:
                row[f"over_{side}"] = round(statistics.median(run["weft"] / run[side] for run in same), digits)
        combined.append(row)
    return combined


def failures(rows: list[dict[str, Any]]) -> list[str]:
    """Return the limits that are missed, one sentence each."""
    violations = []
    for row in rows:
        what = f"{row['call']} of {row['num_bytes']} bytes on {row['num_ranks']} ranks"
        min_ratio = MIN_RATIOS.get(row["num_ranks"], {}).get(row["call"], {}).get(row["num_bytes"], 0.0)
        if row["gloo_over_weft"] < min_ratio:
            violations.append(f"{what}: gloo / weft is {row['gloo_over_weft']}, wanted at least {min_ratio:g}.")
        limit = MAX_REDUCE_SCATTER["large" if row["num_bytes"] >= MIB else "small"]
        if row.get("over_all_reduce", 0.0) > limit:
            violations.append(f"{what}: {row['over_all_reduce']} of weft's all-reduce, wanted at most {limit:g}.")
        baselines = {"memcpy_in_step": "a memcpy in step"}
        if row["num_ranks"] <= len(os.sched_getaffinity(0)):
            baselines["memcpy"] = "a memcpy"  # see docs/decisions/0019-the-bound-is-a-copy-in-step.md
        for side, baseline in baselines.items():
            if row["num_bytes"] == 4 * MIB and row.get(f"over_{side}", 0.0) > MAX_MEMCPY:
                violations.append(f"{what}: {row[f'over_{side}']} of {baseline}, wanted at most {MAX_MEMCPY:g}.")
    return violations


def print_table(report: dict[str, Any]) -> None:
    machine = report["machine"]
    print(f"{machine['cpu']}, {machine['cpu_count']} cores, torch {machine['torch']}, {machine['date']}")
    print(f"{'ranks':>5} {'call':<15} {'KiB':>6} {'weft us':>10} {'gloo us':>10} {'ratio':>7}  of")
    for row in report["results"]:
        others = [f"all-reduce {row['over_all_reduce']}"] if "over_all_reduce" in row else []
        if "over_memcpy" in row:
            others.append(f"memcpy {row['over_memcpy']}, in step {row['over_memcpy_in_step']}")
        print(
            f"{row['num_ranks']:>5} {row['call']:<15} {row['num_bytes'] // KIB:>6} {row['weft_us']:>10.1f} "
            f"{row['gloo_us']:>10.1f} {row['gloo_over_weft']:>7.2f}  {', '.join(others)}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="processes of the group, one or several")
    parser.add_argument("--runs", type=int, default=5, help="runs, each on fresh ranks, whose median is taken")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="bytes")
    parser.add_argument("--json", action="store_true", help="print one JSON object, not a table")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a limit is missed")
    args = parser.parse_args()
    if min(args.ranks) < 2 or args.runs < 1:
        parser.error("give --ranks of 2 or more and --runs of 1 or more.")

    report: dict[str, Any] = {"benchmark": "collectives", "machine": machine_facts(), "num_runs": args.runs}
    report["results"] = []
    for num_ranks in args.ranks:
        runs = [run_on_ranks(measure, num_ranks, args.sizes) for _ in range(args.runs)]
        report["results"] += combine(num_ranks, runs)
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
