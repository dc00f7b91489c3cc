"""Peak memory of each rank while a model is trained on 1, 2, 4 and 8 ranks: stock Lightning and weft.

    python benchmarks/memory.py [--ranks 1 2 4 8] [--workloads feed_forward] [--columns weft] [--small] [--json]
                                [--output FILE] [--report FOLDER] [--simulate [--device cuda]] [--resident]

Every row is a training run on fresh ranks. On CPU an allocator counts their tensors to the byte (docs/memory.md).
Start-up is the time before the first training step, training is the rest; a figure is the largest of all ranks.
Figures are reported with the memory model's prediction and the ideal: the prediction for one rank, divided by the
number of ranks. With --simulate only rank 0 runs, and torch's fake process group simulates the other ranks: the
allocations of a rank do not depend on the values it receives. So one CUDA device shows the device memory of a rank of
eight: the tensors and, as in the figures of Lightning's documentation on tensor parallelism, cuBLAS's workspaces
(CUBLAS_WORKSPACE_CONFIG, the same for all columns), without the rank's host memory. Predictions are for CPU ranks,
including shared memory, even for rows measured on CUDA. The error of a row that fails is printed, the other rows are
still measured, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp
from common import cuda_facts, machine_facts, run_on_ranks
from memory_report import source_of, write_report
from memory_workloads import CONFIGURATIONS, predicted, train, training_peak, workloads

import weft


def measure(
    workload: str, configuration: str, small: bool, device: str, is_simulated: bool, resident: bool
) -> list[dict[str, Any]]:
    """Train on this rank; return the peaks of all ranks or, if the others are simulated, of this rank. Collective."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    if device == "cpu":
        weft.memory.track()
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(num_ranks))
    if resident:
        train(workloads(True)[workload], CONFIGURATIONS[configuration], num_ranks)  # the small model, to load all code
        gc.collect()
        weft.memory.reset_peak()
        before = resident_bytes("VmRSS") - weft.memory.current()
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    peaks = train(workloads(small)[workload], CONFIGURATIONS[configuration], num_ranks, device, is_simulated)
    if resident:
        peaks["resident_growth"] = resident_bytes("VmHWM") - before
    if is_simulated:
        return [peaks]
    gathered: list[Any] = [None] * num_ranks
    dist.all_gather_object(gathered, peaks)
    return gathered


def resident_bytes(field: str) -> int:
    """Return the resident bytes of this process as Linux counts them: "VmRSS" now, "VmHWM" at the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def row_of(
    workload: str,
    configuration: str,
    small: bool,
    num_ranks: int,
    device: str = "cpu",
    simulate: bool = False,
    resident: bool = False,
) -> dict[str, Any]:
    """Run one row; return its largest peaks of any rank, the predictions, and the peaks of each rank."""
    backend = "fake" if simulate else "gloo" if configuration.startswith("stock") else "cpu:weft"
    ranks = run_on_ranks(
        measure, num_ranks, workload, configuration, small, device, simulate, resident, backend=backend
    )
    startup, training = (max(peak_bytes_of(rank[name]) for rank in ranks) for name in ("startup", "training"))
    model = workloads(small)[workload], CONFIGURATIONS[configuration]
    phases, on_one = (predicted(*model, num, device) for num in (num_ranks, 1))
    return {
        "workload": workload,
        "column": configuration,
        "num_ranks": num_ranks,
        "startup_bytes": startup,
        "training_bytes": training,
        "peak_bytes": max(startup, training),
        "predicted_bytes": training_peak(phases),
        "predicted_startup_bytes": sum(phases["init"].values()),
        "predicted_phases": phases,
        "ideal_bytes": training_peak(on_one) // num_ranks,
        "resident_bytes": max(rank["resident_growth"] for rank in ranks) if resident else None,
        "ranks": ranks,
    }


def peak_bytes_of(usage: dict[str, int]) -> int:
    """Return the total bytes of a peak: the sum of all categories; on CUDA the allocated, not the reserved bytes."""
    return usage["allocated"] if "allocated" in usage else sum(usage.values())


def print_table(report: dict[str, Any]) -> None:
    print(source_of(report))
    figures = ("startup_bytes", "training_bytes", "peak_bytes", "predicted_bytes", "ideal_bytes", "resident_bytes")
    names = " ".join(f"{name.removesuffix('_bytes'):>9}" for name in figures)
    print(f"{'workload':<15} {'column':<20} {'ranks':>5} {names}  at the training peak")
    for row in report["results"]:
        most = max(row["ranks"], key=lambda rank: peak_bytes_of(rank["training"]))["training"]
        categories = ", ".join(f"{name} {size / 1e9:.4f}" for name, size in most.items() if size)
        values = " ".join(f"{'-' if row[name] is None else f'{row[name] / 1e9:.4f}':>9}" for name in figures)
        print(f"{row['workload']:<15} {row['column']:<20} {row['num_ranks']:>5} {values}  {categories}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--workloads", nargs="+", default=list(workloads(True)), choices=list(workloads(True)))
    parser.add_argument("--columns", nargs="+", default=list(CONFIGURATIONS), choices=list(CONFIGURATIONS))
    parser.add_argument("--small", action="store_true", help="small models, which take seconds, not minutes")
    parser.add_argument("--json", action="store_true", help="print one JSON object, not a table")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the JSON there after every row, too")
    parser.add_argument("--report", type=Path, metavar="FOLDER", help="write results.json, table.md and memory.svg")
    parser.add_argument("--simulate", action="store_true", help="run only rank 0, and simulate the others")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="cuda: with --simulate only")
    parser.add_argument("--resident", action="store_true", help="also report the processes' peak resident bytes")
    args = parser.parse_args()
    if min(args.ranks) < 1:
        parser.error("give --ranks of 1 or more.")
    if args.resident and (args.simulate or args.small):
        parser.error("--resident compares real ranks at real sizes: leave --simulate and --small out.")
    if args.device == "cuda" and not args.simulate:
        parser.error("--device cuda measures on one device: give --simulate, too.")
    if args.device == "cuda" and args.small:
        parser.error("--small on cuda measures workspaces and rounding: leave it out.")
    if args.device == "cuda":
        # Lightning's figures are from an A100, whose workspaces have these sizes; newer devices default to larger ones.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8")
    machine = machine_facts() | (cuda_facts() if args.device == "cuda" else {})
    report: dict[str, Any] = {
        "benchmark": "memory",
        "machine": machine,
        "device": args.device,
        "simulated": args.simulate,
        "results": [],
        "failed": [],
    }
    for workload in args.workloads:
        for configuration in args.columns:
            if not CONFIGURATIONS[configuration].is_for(workloads(args.small)[workload]):
                continue
            for num_ranks in args.ranks:
                name = f"{workload}, {configuration}, {num_ranks} ranks"
                try:
                    row = row_of(
                        workload, configuration, args.small, num_ranks, args.device, args.simulate, args.resident
                    )
                except (mp.ProcessRaisedException, mp.ProcessExitedException, TimeoutError) as error:
                    report["failed"].append({"row": name, "error": str(error)})
                    print(f"{name}: {error}", file=sys.stderr)
                else:
                    report["results"].append(row)
                    print(f"{name}: done", file=sys.stderr)
                if args.output is not None:
                    args.output.write_text(json.dumps(report, indent=2))
    if args.report is not None:
        write_report(report, args.report)
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        print_table(report)
    return 1 if report["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
