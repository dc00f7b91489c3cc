"""Seconds of a training step of Lightning's FeedForward(8192, 8192): weft's options against Lightning's, in one run.

    python benchmarks/step_time.py [--ranks 2] [--json] [--check]
    python benchmarks/step_time.py --tracking [--ranks 2] [--json] [--check]

A step is forward, backward and AdamW on a batch of 8. "stock" is Lightning's documented DTensor plan on gloo with
torch's default AdamW. With --tracking, the script compares weft's step in processes that count memory with its step in
processes that do not, started in turn, for this model and for the examples' language model.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import interleaved_seconds, machine_facts, median_paired_ratio, run_on_ranks
from memory_workloads import workloads
from op_overhead import mesh_on, wait_for, with_dtensor
from torch import Tensor
from torch.optim import AdamW, Optimizer

import weft
from weft.strategy import StepInBackward, fuse

DIM, BATCH, NUM_SAMPLES = 8192, 8, 9
# The limits of --check on the median of paired ratios of seconds.
MAX_OVER_STOCK = 0.6  # seconds of "weft" / "stock"
MAX_TRACKING = 1.02  # seconds with memory counted / without
TRACKED_STEPS, TRACKED_PAIRS = {"feed_forward": 7, "language_model": 60}, 9  # timed steps of a run; pairs of runs


def _step(optimizer: Optimizer, loss_of: Callable[[], Tensor]) -> Callable[[], None]:
    def step() -> None:
        loss = loss_of()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def measure() -> dict[str, list[float]]:
    """Return the seconds per step of each candidate by sample, the candidates taken in turn; collective."""
    torch.manual_seed(0)
    x = torch.randn(BATCH, DIM)
    steps: dict[str, Callable[[], None]] = {}
    for name in ("stock", "weft", "weft_own_optimizer", "weft_in_backward", "weft_by_rows"):
        if name == "stock":
            model = with_dtensor(DIM, mesh_on("gloo"))
        else:
            with weft.strategy.deferred_init():
                model = workloads(False)["feed_forward"].build()
            weft.parallelize(model, mesh_on("cpu:weft"), "auto")
        optimizer = AdamW(model.parameters(), lr=3e-3)
        if name in ("weft", "weft_in_backward", "weft_by_rows"):
            fuse(optimizer, model)
        if name in ("weft_in_backward", "weft_by_rows"):
            StepInBackward(model, optimizer, by_rows=name == "weft_by_rows")
        steps[name] = _step(optimizer, lambda model=model: wait_for(model(x)).sum())
    return interleaved_seconds(steps, num_samples=NUM_SAMPLES, calls_per_sample=1, warm_up=2)


def step_seconds(workload: str, is_tracked: bool) -> float:
    """Return the median seconds of weft's step; `is_tracked`: count memory, as weft's strategies do. Collective."""
    if is_tracked:
        weft.memory.track()
    chosen = workloads(False)[workload]
    torch.manual_seed(0)
    with weft.strategy.deferred_init():
        model = chosen.build()
    weft.parallelize(model, mesh_on("cpu:weft"), "auto")
    optimizer = AdamW(model.parameters(), lr=3e-3)
    fuse(optimizer, model)
    if is_tracked:
        weft.memory.watch(model, optimizer)
    if chosen.vocab_size is None:
        x = torch.randn(chosen.batch)
        step = _step(optimizer, lambda: model(x).sum())
    else:
        ids = torch.randint(chosen.vocab_size, chosen.batch)
        targets = ids[:, 1:].flatten()
        step = _step(optimizer, lambda: F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), targets))
    for _ in range(3):
        step()
    seconds = []
    for _ in range(TRACKED_STEPS[workload]):
        dist.barrier()
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def over_stock(num_ranks: int) -> list[dict[str, Any]]:
    seconds = run_on_ranks(measure, num_ranks, timeout_seconds=550.0)
    return [
        {
            "name": name,
            "median_seconds": statistics.median(times),
            "ratio": median_paired_ratio(times, seconds["stock"]),
            "bar": MAX_OVER_STOCK if name == "weft" else None,
        }
        for name, times in seconds.items()
    ]


def tracking(num_ranks: int) -> list[dict[str, Any]]:
    results = []
    for workload in TRACKED_STEPS:
        times: dict[bool, list[float]] = {False: [], True: []}
        for pair in range(TRACKED_PAIRS):
            for is_tracked in (False, True) if pair % 2 == 0 else (True, False):
                times[is_tracked].append(
                    run_on_ranks(step_seconds, num_ranks, workload, is_tracked, timeout_seconds=200.0)
                )
            print(f"{workload}: {pair + 1} of {TRACKED_PAIRS}", file=sys.stderr)
        results.append(
            {
                "name": f"{workload}, counted",
                "median_seconds": statistics.median(times[True]),
                "ratio": median_paired_ratio(times[True], times[False]),
                "bar": MAX_TRACKING,
            }
        )
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, help="processes of the group")
    parser.add_argument("--tracking", action="store_true", help="measure the cost of counting memory")
    parser.add_argument("--json", action="store_true", help="print one JSON object, not a table")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a limit is missed")
    args = parser.parse_args()
    if args.ranks < 1:
        parser.error(f"got --ranks {args.ranks}; give 1 or more.")
    results = tracking(args.ranks) if args.tracking else over_stock(args.ranks)
    report = {"benchmark": "step_time", "machine": machine_facts(), "num_ranks": args.ranks, "results": results}
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        machine = report["machine"]
        print(f"{machine['cpu']}, {machine['cpu_count']} cores, torch {machine['torch']}, {machine['date']}")
        for row in results:
            print(f"{row['name']:<24} {row['median_seconds'] * 1e3:>10.2f} ms  ratio {row['ratio']:.3f}")
    violations = [row for row in results if row["bar"] is not None and row["ratio"] > row["bar"]] if args.check else []
    for row in violations:
        print(f"{row['name']}: the ratio is {row['ratio']:.3f}, wanted at most {row['bar']}.", file=sys.stderr)
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
