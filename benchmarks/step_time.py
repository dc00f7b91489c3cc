"""Seconds of a training step of Lightning's FeedForward(8192, 8192): weft's options against Lightning's, in one run.

    python benchmarks/step_time.py [--ranks 2] [--json] [--check]
    python benchmarks/step_time.py --tracking [--ranks 2] [--json] [--check]
    python benchmarks/step_time.py --formats [--ranks 2] [--json] [--check]

A step is forward, backward and AdamW on a batch of 8. "stock" is Lightning's documented DTensor plan on gloo with
torch's default AdamW. With --tracking, the script compares weft's step in processes that count memory with its step in
processes that do not, started in turn, for this model and for the examples' language model.
With --formats, it compares steps with low-precision states and split weights with weft's step in float32, for
FeedForward(4096, 4096), in three sets of processes. Formats with split weights run under bfloat16 autocast, and are
compared with float32 weights under the same autocast.
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
from common import FeedForward, interleaved_seconds, machine_facts, median_paired_ratio, run_on_ranks
from memory_workloads import workloads
from op_overhead import mesh_on, wait_for, with_dtensor
from optimizer_loss import BASELINES, FORMATS
from torch import Tensor
from torch.optim import AdamW, Optimizer

import weft
from weft.strategy import StepInBackward, fuse

DIM, BATCH, NUM_SAMPLES = 8192, 8, 9
# The limits of --check on the median of paired ratios of seconds.
MAX_OVER_STOCK = 0.6  # seconds of "weft" / "stock"
MAX_TRACKING = 1.02  # seconds with memory counted / without
BY_ROWS = ", by rows"
FORMATS_DIM, FORMATS_SETS = 4096, 3
MAX_OVER_FLOAT32 = 1.15  # seconds with low-precision states or split weights / in float32
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


def measure_formats() -> dict[str, list[float]]:
    """Return the seconds per step of each format, stepping after and inside the backward, by sample; collective."""
    x = torch.randn(BATCH, FORMATS_DIM)
    steps: dict[str, Callable[[], None]] = {}
    for by_rows in (False, True):
        for name, (states, weights, has_autocast) in FORMATS.items():
            torch.manual_seed(0)
            with weft.strategy.deferred_init():
                model = FeedForward(FORMATS_DIM, FORMATS_DIM)
            weft.parallelize(model, mesh_on("cpu:weft"), "auto")
            optimizer = AdamW(model.parameters(), lr=3e-3)
            fuse(optimizer, model, optimizer_state=states, master_weights=weights)
            if by_rows:
                StepInBackward(model, optimizer, by_rows=True)

            def loss_of(model: torch.nn.Module = model, has_autocast: bool = has_autocast) -> Tensor:
                with torch.autocast("cpu", torch.bfloat16, enabled=has_autocast):
                    return wait_for(model(x)).sum()

            steps[name + BY_ROWS * by_rows] = _step(optimizer, loss_of)
    return interleaved_seconds(steps, num_samples=NUM_SAMPLES, calls_per_sample=2, warm_up=2)


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


def over_float32(num_ranks: int) -> list[dict[str, Any]]:
    sets = [run_on_ranks(measure_formats, num_ranks, timeout_seconds=550.0) for _ in range(FORMATS_SETS)]
    results = []
    for name in sets[0]:
        format_name = name.removesuffix(BY_ROWS)
        baseline = BASELINES[format_name] + name[len(format_name) :]
        ratios = [median_paired_ratio(seconds[name], seconds[baseline]) for seconds in sets]
        results.append(
            {
                "name": name,
                "median_seconds": statistics.median(time for seconds in sets for time in seconds[name]),
                "ratio": statistics.median(ratios),
                "ratios": ratios,
                "bar": MAX_OVER_FLOAT32 if name != baseline else None,
            }
        )
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, help="processes of the group")
    parser.add_argument("--tracking", action="store_true", help="measure the cost of counting memory")
    parser.add_argument("--formats", action="store_true", help="measure low-precision states and split weights")
    parser.add_argument("--json", action="store_true", help="print one JSON object, not a table")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a limit is missed")
    args = parser.parse_args()
    if args.ranks < 1:
        parser.error(f"got --ranks {args.ranks}; give 1 or more.")
    if args.tracking and args.formats:
        parser.error("got --tracking and --formats; give one of them.")
    results = (tracking if args.tracking else over_float32 if args.formats else over_stock)(args.ranks)
    report = {"benchmark": "step_time", "machine": machine_facts(), "num_ranks": args.ranks, "results": results}
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        machine = report["machine"]
        print(f"{machine['cpu']}, {machine['cpu_count']} cores, torch {machine['torch']}, {machine['date']}")
        for row in results:
            print(f"{row['name']:<28} {row['median_seconds'] * 1e3:>10.2f} ms  ratio {row['ratio']:.3f}")
    violations = [row for row in results if row["bar"] is not None and row["ratio"] > row["bar"]] if args.check else []
    for row in violations:
        print(f"{row['name']}: the ratio is {row['ratio']:.3f}, wanted at most {row['bar']}.", file=sys.stderr)
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
