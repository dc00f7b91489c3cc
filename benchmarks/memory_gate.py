"""Compares the memory of training, the rows of benchmarks/memory.py, with a golden file, to the byte.

The scratch of bfloat16 products depends on the processor, and may differ by BFLOAT16_SCRATCH_BYTES.

    python benchmarks/memory_gate.py                       # exit status 1 if a figure differs, even if it is lower,
                                                           # or if the memory model does not predict it
    python benchmarks/memory_gate.py --quick               # fewer rows, most of 8 ranks simulated; as in `make test`
    python benchmarks/memory_gate.py --update "REASON"     # store the measured figures; prints old -> new
    python benchmarks/memory_gate.py --cuda                # simulated ranks on a CUDA device: torch's caching allocator
    python benchmarks/memory_gate.py --cuda --page         # write its figures to docs/benchmarks/memory.md

The golden file is for the version of torch that it names; with another version, and without --update, the exit status
is 2.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import memory_cuda_page
import torch
from memory import row_of
from memory_workloads import CONFIGURATIONS, workloads

GOLDEN = Path(__file__).with_name("memory_golden.json")
# The figures are those of the CUDA runtime without a device, on which the tests run.
CUDA_GOLDEN = Path(__file__).with_name("memory_cuda_golden.json")
CUDA_COLUMNS = {
    "feed_forward": ("stock", "weft", "weft_in_backward", "weft_by_rows"),
    "activations": ("stock", "weft", "weft_recompute"),
    "language_model": ("stock", "weft", "weft_checkpointed"),
}
RANKS = (1, 2, 4, 8)
QUICK_RANKS = (2, 8)
PREDICTION_BOUND = 0.02
# Configurations whose effect is the same for both workloads.
_AS_IN_FEED_FORWARD = ("weft_int8", "weft_by_rows", "weft_own_optimizer")
# oneDNN's temporaries in bfloat16 products depend on the processor: by up to 2 MB on its instructions (AMX, AVX-512
# with bfloat16 and without), so that the gate limits them, and by 20 to 70 kB on other features.
ONEDNN_INSTRUCTIONS = "AVX2"
BFLOAT16_SCRATCH_BYTES = 128 * 1024
Rows = dict[str, dict[str, int]]


def wanted_rows(with_real_size: bool, ranks: Sequence[int] = RANKS) -> list[tuple[str, str, bool, int]]:
    """Return (workload, configuration, small, num_ranks) of weft's rows: of small models, and some of real size.

    The configuration "weft" has rows of real size for all of `RANKS`. The rows of stock Lightning are left out, because
    the time at which gloo's threads release a tensor differs from run to run.
    """
    rows = [
        (name, configuration, True, n)
        for name, workload in workloads(True).items()
        for configuration, settings in CONFIGURATIONS.items()
        if settings.options is not None and settings.is_for(workload) and settings.is_for_small
        if not (name == "activations" and configuration in _AS_IN_FEED_FORWARD)
        for n in ranks
    ]
    if with_real_size:
        rows += [("feed_forward", "weft", False, n) for n in RANKS]
        others = ("weft_in_backward", "weft_int8", "weft_int8_split8")
        rows += [("feed_forward", configuration, False, n) for configuration in others for n in ranks]
        rows.append(("feed_forward", "weft_by_rows", False, 2))  # small models' weights have too few rows for this
    return rows


def row_name(workload: str, configuration: str, small: bool, num_ranks: int) -> str:
    return f"{workload}{'' if small else ' at real size'}, {configuration}, {num_ranks} ranks"


def is_simulated(configuration: str, num_ranks: int) -> bool:
    """Return whether --quick runs only rank 0 of a row and simulates the others, which takes an eighth of the time."""
    return num_ranks == 8 and configuration != "weft"


def without_shared_memory(figures: dict[str, int]) -> dict[str, int]:
    """Return the figures that a row has with simulated ranks, too, which use no shared memory."""
    return {name: value for name, value in figures.items() if name not in ("startup", "training", "communication")}


def measured(wanted: list[tuple[str, str, bool, int]], is_quick: bool = False) -> tuple[Rows, list[str]]:
    """Return the figures of each row by the row's name, and a sentence for each that the memory model does not predict.

    The figures are the largest peaks of any rank before and during training, and the latter peak by category.
    """
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", ONEDNN_INSTRUCTIONS)  # for the ranks, which start after this
    rows: Rows = {}
    misses: list[str] = []
    for workload, configuration, small, num_ranks in wanted:
        simulate = is_quick and is_simulated(configuration, num_ranks)
        row = row_of(workload, configuration, small, num_ranks, simulate=simulate)
        most = max((rank["training"] for rank in row["ranks"]), key=lambda usage: sum(usage.values()))
        name = row_name(workload, configuration, small, num_ranks)
        rows[name] = {"startup": row["startup_bytes"], "training": row["training_bytes"], **most}
        if simulate:
            rows[name] = without_shared_memory(rows[name])
        # Recognising the layers of a small model takes more memory than its parameters do.
        totals = [] if simulate else ["training"] if small else ["training", "startup"]
        misses += [f"{name}: {sentence}" for sentence in prediction_misses(row, most, totals)]
        print(f"{name}: {row['training_bytes']}, predicted {row['predicted_bytes']}", file=sys.stderr)
    return rows, misses


def measured_on_cuda() -> Rows:
    """Return the bytes that one of 1, 2, 4 and 8 ranks allocates and reserves for `CUDA_COLUMNS`."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8")  # as benchmarks/memory.py
    rows: Rows = {}
    wanted = [(name, column, n) for name, columns in CUDA_COLUMNS.items() for column in columns for n in RANKS]
    for workload, column, num_ranks in wanted:
        [peaks] = row_of(workload, column, False, num_ranks, device="cuda", simulate=True)["ranks"]
        rows[memory_cuda_page.row_name(workload, column, num_ranks)] = {
            f"{phase} {kind}": peaks[phase][kind]
            for phase in ("startup", "training")
            for kind in ("allocated", "reserved")
        }
    return rows


def page_with_figures(golden: dict[str, Any]) -> str:
    """Return the text of docs/benchmarks/memory.md with the figures of the golden file of --cuda."""
    table = memory_cuda_page.table(golden, CUDA_COLUMNS, RANKS)
    return memory_cuda_page.with_table(memory_cuda_page.PAGE.read_text(), table)


def prediction_misses(row: dict[str, Any], most: dict[str, int], totals: Sequence[str]) -> list[str]:
    """Return a sentence for each miss: parameters and optimizer states must match to the byte, totals within 2 %."""
    sentences = []
    for figure in ("parameters", "optimizer_state"):
        expected = row["predicted_phases"]["step"][figure]
        if most[figure] != expected:
            sentences.append(f"{figure} {most[figure]} bytes, predicted {expected}.")
    for total in totals:
        got = row[f"{total}_bytes"]
        expected = row["predicted_bytes" if total == "training" else "predicted_startup_bytes"]
        if abs(got - expected) > PREDICTION_BOUND * got:
            sentences.append(f"{total}_bytes {got}, predicted {expected}.")
    return sentences


def differences(golden: Rows, rows: Rows) -> list[str]:
    """Return a sentence for each row that is missing, new, or has another figure."""
    sentences = [f"{name}: the row is missing." for name in golden if name not in rows]
    sentences += [f"{name}: the row is not in the golden file." for name in rows if name not in golden]
    for name in golden.keys() & rows.keys():
        for figure in sorted(golden[name].keys() | rows[name].keys()):
            old, new = golden[name].get(figure), rows[name].get(figure)
            allowed = BFLOAT16_SCRATCH_BYTES if _depends_on_processor(name, figure) else 0
            if old is None or new is None or abs(new - old) > allowed:
                sentences.append(f"{name}: {figure} {old} -> {new} bytes.")
    return sorted(sentences)


def _depends_on_processor(name: str, figure: str) -> bool:
    """Return whether a figure of a row contains the temporaries of bfloat16 products on CPUs."""
    configurations = [CONFIGURATIONS[part] for part in name.split(", ") if part in CONFIGURATIONS]
    is_bfloat16 = any(configuration.precision != "32-true" for configuration in configurations)
    return is_bfloat16 and figure in ("scratch", "training")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--update", metavar="REASON", help="why the figures change")
    parser.add_argument("--small-only", action="store_true", help="leave the rows of the real size out")
    parser.add_argument("--quick", action="store_true", help="leave out 1 and 4 ranks, simulate most of 8")
    parser.add_argument("--cuda", action="store_true", help="simulated ranks on a CUDA device")
    parser.add_argument("--page", action="store_true", help="with --cuda: measure nothing, write the page's table")
    args = parser.parse_args()
    path = CUDA_GOLDEN if args.cuda else GOLDEN
    if args.update is not None and len(args.update.split()) < 3:
        parser.error("give a reason of a few words to --update.")
    if args.quick and args.update is not None:
        parser.error("rows with simulated ranks lack figures: give --update without --quick.")
    golden: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"rows": {}, "changes": []}
    if args.page:
        if not args.cuda:
            parser.error("the page has the figures of --cuda: give --cuda, too.")
        memory_cuda_page.PAGE.write_text(page_with_figures(golden))
        return 0
    if args.update is None and golden.get("torch") != torch.__version__:
        print(f"the golden file is of torch {golden.get('torch')}, and this is {torch.__version__}.", file=sys.stderr)
        return 2
    wanted = wanted_rows(not args.small_only, QUICK_RANKS if args.quick else RANKS)
    rows, misses = (measured_on_cuda(), []) if args.cuda else measured(wanted, args.quick)
    old: Rows = golden["rows"]
    is_partial = args.small_only or args.quick
    if is_partial:
        names = {row_name(*row): args.quick and is_simulated(row[1], row[3]) for row in wanted}
        old = {name: without_shared_memory(row) if names[name] else row for name, row in old.items() if name in names}
    changes = differences(old, rows)
    print("\n".join(changes) if changes else f"{len(rows)} rows as they were.")
    if not args.cuda:
        print("\n".join(misses) if misses else f"{len(rows)} rows as predicted.")
    if args.update is None:
        return 1 if changes or misses else 0
    golden["torch"] = torch.__version__
    golden["rows"] = {**(golden["rows"] if is_partial else {}), **rows}
    golden["changes"].append({"date": datetime.date.today().isoformat(), "reason": args.update})
    path.write_text(json.dumps(golden, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
