"""Peak memory of each rank while a model is trained on 1, 2, 4 and 8 ranks: stock Lightning and weft.

    python benchmarks/memory.py [--ranks 1 2 4 8] [--workloads feed_forward] [--columns weft] [--small] [--json]

Every row is a training run on fresh CPU ranks, whose tensors an allocator counts to the byte (docs/memory.md). Start-up
is all that comes before the first training step, training what follows; the figure is that of the rank with the most.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import warnings
from typing import Any

import torch.distributed as dist
from common import machine_facts, run_on_ranks
from memory_workloads import COLUMNS, train, workloads

import weft


def measure(workload: str, column: str, small: bool) -> list[dict[str, Any]]:
    """On every rank: train, and collect what all ranks have seen."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    weft.memory.track()
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(num_ranks))
    seen = train(workloads(small)[workload], COLUMNS[column], num_ranks)
    everyone: list[Any] = [None] * num_ranks
    dist.all_gather_object(everyone, seen)
    return everyone


def row_of(workload: str, column: str, small: bool, num_ranks: int) -> dict[str, Any]:
    """One run: bytes of the rank with the most."""
    backend = "gloo" if column.startswith("stock") else "cpu:weft"
    ranks = run_on_ranks(measure, num_ranks, workload, column, small, backend=backend)
    startup = max(sum(rank["startup"].values()) for rank in ranks)
    training = max(sum(rank["training"].values()) for rank in ranks)
    return {
        "workload": workload,
        "column": column,
        "num_ranks": num_ranks,
        "startup_bytes": startup,
        "training_bytes": training,
        "peak_bytes": max(startup, training),
        "ranks": ranks,
    }


def print_table(report: dict[str, Any]) -> None:
    machine = report["machine"]
    print(f"{machine['cpu']}, torch {machine['torch']}, {machine['date']}; GB = 1e9 bytes")
    names = f"{'workload':<15} {'column':<20} {'ranks':>5} {'start-up':>9} {'training':>9} {'peak':>9}"
    print(f"{names}  at the training peak")
    for row in report["results"]:
        most = max(row["ranks"], key=lambda rank: sum(rank["training"].values()))["training"]
        parts = ", ".join(f"{name} {size / 1e9:.4f}" for name, size in most.items() if size)
        figures = " ".join(f"{row[name] / 1e9:>9.4f}" for name in ("startup_bytes", "training_bytes", "peak_bytes"))
        print(f"{row['workload']:<15} {row['column']:<20} {row['num_ranks']:>5} {figures}  {parts}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--workloads", nargs="+", default=list(workloads(True)), choices=list(workloads(True)))
    parser.add_argument("--columns", nargs="+", default=list(COLUMNS), choices=list(COLUMNS))
    parser.add_argument("--small", action="store_true", help="sizes for a gate: seconds, not minutes")
    parser.add_argument("--json", action="store_true", help="print one JSON object, not a table")
    args = parser.parse_args()
    if min(args.ranks) < 1:
        parser.error("give --ranks of 1 or more.")
    report: dict[str, Any] = {"benchmark": "memory", "machine": machine_facts(), "results": []}
    for workload in args.workloads:
        for column in args.columns:
            for num_ranks in args.ranks:
                report["results"].append(row_of(workload, column, args.small, num_ranks))
                print(f"{workload}, {column}, {num_ranks} ranks: done", file=sys.stderr)
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        print_table(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
