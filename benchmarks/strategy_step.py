"""Seconds and peak memory of a training step of a small Llama under the Trainer: weft's strategy against Lightning's.

    python benchmarks/strategy_step.py [--layouts tp2 dp2 dp2,tp2] [--dims 128 512 1024] [--samples 5] [--json]
                                       [--check]

Both strategies train examples/model.py with AdamW in `Trainer.fit`, from the same weights on the same batches, to the
same losses. "stock" is ModelParallelStrategy on gloo with the `configure_model` of its documentation. With a
tensor-parallel axis, wq, wk, wv, w1, w3 are ColwiseParallel and wo, w2 RowwiseParallel (the variant without
SequenceParallel). With a data-parallel axis, `fully_shard` is then applied to each block and to the root, and the last
block stays unsharded between its forward and its backward. weft gets plan="auto" and a layout. The default group of a
process has one backend, so each candidate is a separate set of processes. The sets train in turn, a sample at a time.

Memory is counted by weft.memory in separate runs: the largest peak of any rank after the warm-up steps, with and
without "communication", the shared memory of the weft backend. Gloo's buffers are not counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import torch
from common import machine_facts, median_paired_ratio
from overlap import noise_of
from process_sets import ProcessSet
from strategy_candidates import CANDIDATES, LAYOUTS, NUM_WARM_UP, SIZES, Size, train
from torch import Tensor

NUM_COUNTED = 1  # samples of the runs that count memory
# The limits of --check, beyond noise, on the median of paired ratios of seconds "weft" / "stock": at the smallest size,
# and at the other sizes.
MAX_RATIO_SMALLEST, MAX_RATIO = 0.5, 1.0


def in_turn(
    size: Size, layout: str, num_samples: int, counts_memory: bool
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Return, by candidate, the slowest rank's seconds per step in each sample, and each rank's peaks (or None)."""
    num_data, num_tensor = LAYOUTS[layout]
    per_sample = 1 if counts_memory else size.steps_per_sample
    num_steps = NUM_WARM_UP + num_samples * per_sample
    sets: dict[str, ProcessSet] = {}
    try:
        for name, candidate in CANDIDATES.items():
            sets[name] = ProcessSet(
                train, num_data * num_tensor, candidate.backend, candidate, size, layout, num_steps, counts_memory
            )
        losses = {name: _losses(each.request(NUM_WARM_UP)) for name, each in sets.items()}
        for name, values in losses.items():
            _check_equal_losses(name, values, losses["stock"])
        seconds: dict[str, list[float]] = {name: [] for name in sets}
        for sample in range(num_samples):
            for name in list(sets) if sample % 2 == 0 else list(sets)[::-1]:
                seconds[name].append(max(took for took, _ in sets[name].request(per_sample)) / per_sample)
        return seconds, {name: each.request(None)[0] for name, each in sets.items()}
    finally:
        for each in sets.values():
            each.close()


def _losses(answers: Sequence[tuple[float, list[float]]]) -> Tensor:
    """Return each step's loss, the mean over all ranks: ranks of a tensor-parallel group have equal losses."""
    return torch.tensor([losses for _, losses in answers], dtype=torch.float64).mean(0)


def _check_equal_losses(name: str, losses: Tensor, stock: Tensor) -> None:
    torch.testing.assert_close(losses, stock, rtol=1e-4, atol=0, msg=lambda text: f"{name}'s losses: {text}")


def rows_of(size: Size, layout: str, num_samples: int) -> list[dict[str, Any]]:
    seconds, _ = in_turn(size, layout, num_samples, counts_memory=False)
    _, tables = in_turn(size, layout, NUM_COUNTED, counts_memory=True)
    rows = []
    for name, times in seconds.items():
        most = max(tables[name], key=lambda row: row["total"] - row["communication"])
        rows.append(
            {
                "layout": layout,
                "num_layers": size.num_layers,
                "dim": size.dim,
                "num_tokens": size.num_tokens,
                "candidate": name,
                "median_seconds": statistics.median(times),
                "ratio": median_paired_ratio(times, seconds["stock"]),
                "noise": noise_of(times, seconds["stock"]) if name != "stock" and num_samples > 1 else 0.0,
                "peak_bytes": max(row["total"] for row in tables[name]),
                "peak_bytes_without_communication": most["total"] - most["communication"],
                "peak_by_category": {n: each for n, each in most.items() if n not in ("rank", "total")},
            }
        )
    return rows


def failures(rows: list[dict[str, Any]]) -> list[str]:
    """Return the limits that are missed, one sentence each: on "weft"'s time, and on the memory of all but "stock"."""
    violations = []
    stock = {(row["layout"], row["dim"]): row for row in rows if row["candidate"] == "stock"}
    for row in rows:
        if row["candidate"] == "stock":
            continue
        where = f"{row['layout']}, dim {row['dim']}, {row['candidate']}"
        limit = MAX_RATIO_SMALLEST if row["dim"] == min(SIZES) else MAX_RATIO
        if row["candidate"] == "weft" and row["ratio"] > limit + row["noise"]:
            violations.append(
                f"{where}: {row['ratio']:.3f} of stock's time, wanted {limit} (noise {row['noise']:.3f})."
            )
        weft_bytes, stock_bytes = row["peak_bytes"], stock[row["layout"], row["dim"]]["peak_bytes"]
        if weft_bytes >= stock_bytes:
            violations.append(f"{where}: a peak of {weft_bytes} bytes, wanted less than stock's {stock_bytes}.")
    return violations


def print_table(report: dict[str, Any]) -> None:
    machine = report["machine"]
    print(f"{machine['cpu']}, {machine['cpu_count']} cores, torch {machine['torch']}, {machine['date']}")
    print(
        f"{'layout':<8} {'dim':>5} {'tokens':>6} {'':<18} {'ms':>9} {'ratio':>6} {'noise':>6} {'MB':>8} {'+ comm.':>8}"
    )
    for row in report["results"]:
        print(
            f"{row['layout']:<8} {row['dim']:>5} {row['num_tokens']:>6} {row['candidate']:<18} "
            f"{row['median_seconds'] * 1e3:>9.1f} {row['ratio']:>6.3f} {row['noise']:>6.3f} "
            f"{row['peak_bytes_without_communication'] / 1e6:>8.2f} {row['peak_bytes'] / 1e6:>8.2f}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--dims", type=int, nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--samples", type=int, default=5, help="samples of each candidate, taken in turn")
    parser.add_argument("--json", action="store_true", help="print one JSON object, not a table")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a limit is missed")
    args = parser.parse_args()
    if args.samples < 1:
        parser.error(f"got --samples {args.samples}; give 1 or more.")
    report: dict[str, Any] = {"benchmark": "strategy_step", "machine": machine_facts(), "results": []}
    for layout in args.layouts:
        for dim in args.dims:
            report["results"] += rows_of(SIZES[dim], layout, args.samples)
            print(f"{layout}, dim {dim}: done", file=sys.stderr)
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
