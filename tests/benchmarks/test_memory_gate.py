"""Training uses exactly the bytes recorded in the golden file, and the gate detects one additional element."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from support import cuda_runtime
from support.processes import run_process

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
PATHS = [str(BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(PATHS)}
GOLDEN = json.loads((BENCHMARKS / "memory_golden.json").read_text())

requires_golden_torch = pytest.mark.skipif(
    torch.__version__ != GOLDEN["torch"], reason=f"the golden file is of torch {GOLDEN['torch']}"
)


@requires_golden_torch
@pytest.mark.timeout(1200)
def test_rows_match_golden_file() -> None:
    result = run_process([sys.executable, BENCHMARKS / "memory_gate.py", "--quick"], env=ENVIRONMENT, timeout=1100)
    assert result.returncode == 0, result.stdout + result.stderr[-3000:]
    assert "rows as they were" in result.stdout and "rows as predicted" in result.stdout


EXTRA_ELEMENT = """
import memory_gate, memory_workloads, torch
own = memory_workloads.FeedForward.__init__

def with_a_buffer(self, *sizes):
    own(self, *sizes)
    self.register_buffer("more", torch.zeros(1))

memory_workloads.FeedForward.__init__ = with_a_buffer
name = "feed_forward, weft, 2 ranks"
rows, misses = memory_gate.measured([("feed_forward", "weft", True, 2)])
golden = memory_gate.json.loads(memory_gate.GOLDEN.read_text())["rows"]
print(*memory_gate.differences({name: golden[name]}, rows), *misses, sep="\\n")
"""


@requires_golden_torch
def test_extra_element_is_detected() -> None:
    result = run_process([sys.executable, "-c", EXTRA_ELEMENT], env=ENVIRONMENT, timeout=100, warm_processes=1)
    assert result.returncode == 0, result.stderr
    old, parameters = (GOLDEN["rows"]["feed_forward, weft, 2 ranks"][figure] for figure in ("training", "parameters"))
    lines = result.stdout.splitlines()
    assert f"feed_forward, weft, 2 ranks: parameters {parameters} -> {parameters + 4} bytes." in lines
    staging = 4096  # a page, for the broadcast of a model's only buffer
    assert f"feed_forward, weft, 2 ranks: training {old} -> {old + 4 + staging} bytes." in lines
    assert f"feed_forward, weft, 2 ranks: parameters {parameters + 4} bytes, predicted {parameters}." in lines


ON_CUDA = """
import json, memory
rows = {f"{workload}, {column}, {n}": memory.row_of(workload, column, False, n, device="cuda", simulate=True)
        for workload, column in (("feed_forward", "stock"), ("feed_forward", "weft"), ("language_model", "stock"),
                                 ("language_model", "weft_in_backward"))
        for n in (1, 8)}
print(json.dumps({name: row["ranks"][0] for name, row in rows.items()}))
"""


@pytest.mark.cuda
def test_simulated_ranks_on_one_cuda_device() -> None:
    environment = {**ENVIRONMENT, **(cuda_runtime.environment(skip_kernels=True) if cuda_runtime.is_active() else {})}
    result = run_process([sys.executable, "-c", ON_CUDA], env=environment, timeout=300)
    assert result.returncode == 0, result.stderr
    rows = json.loads(result.stdout.splitlines()[-1])
    for name, row in rows.items():
        for phase in ("startup", "training"):
            assert 0 < row[phase]["allocated"] <= row[phase]["reserved"], name
    weights = 3 * 8192 * 8192 * 4
    workspaces = 2 * 64 << 20  # an upper bound: one for the forward thread, one for the backward thread
    assert 5 * weights <= rows["feed_forward, stock, 1"]["training"]["allocated"] <= 5 * weights + workspaces
    assert 4 * weights / 8 <= rows["feed_forward, weft, 8"]["training"]["allocated"] <= 4.1 * weights / 8 + workspaces
    assert rows["feed_forward, weft, 8"]["startup"]["allocated"] <= 1.05 * weights / 8


@requires_golden_torch
@pytest.mark.cuda_runtime
def test_rows_on_cuda_match_golden_file() -> None:
    environment = {**ENVIRONMENT, **cuda_runtime.environment(skip_kernels=True)}
    result = run_process([sys.executable, BENCHMARKS / "memory_gate.py", "--cuda"], env=environment, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr[-3000:]
    assert "40 rows as they were" in result.stdout


PAGE = """
import json, memory_cuda_page, memory_gate
golden = json.loads(memory_gate.CUDA_GOLDEN.read_text())
page = memory_cuda_page.PAGE.read_text()
assert memory_gate.page_with_figures(golden) == page
golden["rows"]["activations at real size, weft, 2 ranks"]["training reserved"] = 123456789
changed = memory_gate.page_with_figures(golden)
assert changed != page and "(0.1235)" in changed
"""


def test_page_has_the_figures_of_the_golden_file() -> None:
    result = run_process([sys.executable, "-c", PAGE], env=ENVIRONMENT, timeout=100, warm_processes=1)
    assert result.returncode == 0, result.stderr


def test_report_lists_failed_rows(tmp_path: Path) -> None:
    report = {
        "device": "cuda",
        "simulated": True,
        "machine": {
            "cpu": "A CPU",
            "gpu": "A GPU",
            "driver": "1.2",
            "cublas_workspace": ":16:8",
            "torch": "2.11",
            "date": "today",
        },
        "failed": [{"row": "language_model, stock, 2 ranks", "error": "..."}],
        "results": [
            {
                "workload": "feed_forward",
                "column": "weft",
                "num_ranks": 2,
                **{f"{name}_bytes": 10**9 for name in ("startup", "training", "peak", "predicted", "ideal")},
                "ranks": [{"training": {"allocated": 10**9, "reserved": 2 * 10**9}}],
            }
        ],
    }
    source = tmp_path / "source.json"
    source.write_text(json.dumps(report))
    program = "import json; from pathlib import Path; from memory_report import write_report"
    program += f"; folder = Path({str(tmp_path)!r})"
    program += "; write_report(json.loads((folder / 'source.json').read_text()), folder)"
    result = run_process([sys.executable, "-c", program], env=ENVIRONMENT, timeout=100, has_optional_packages=True)
    assert result.returncode == 0, result.stderr
    table = (tmp_path / "table.md").read_text()
    assert table.startswith("A GPU (driver 1.2, CUBLAS_WORKSPACE_CONFIG=:16:8), rank 0 with the others simulated, ")
    assert "| feed_forward | weft | 2 | 1.0000 | 1.0000 | 1.0000 | 1.0000 | +0.00 % | 1.0000 | 2.0000 |" in table
    assert "Not measured: language_model, stock, 2 ranks." in table
    assert json.loads((tmp_path / "results.json").read_text()) == report
    assert "<svg" in (tmp_path / "memory.svg").read_text()


RESIDENT = """
import memory
row = memory.row_of("feed_forward", "weft", False, 2, resident=True)
print(row["peak_bytes"], row["resident_bytes"])
"""


def test_resident_memory_matches_counted_bytes() -> None:
    """On 2 ranks, the documented model's peak resident memory grows by at most 5 % more than the counted bytes."""
    result = run_process([sys.executable, "-c", RESIDENT], env=ENVIRONMENT, timeout=200)
    assert result.returncode == 0, result.stderr
    counted, resident = map(int, result.stdout.splitlines()[-1].split())
    assert counted <= resident <= 1.05 * counted


DIFFERENCES = """
from memory_gate import differences
golden = {"a": {"peak": 10, "other": 1}, "gone": {"peak": 5}}
print(*differences(golden, {"a": {"peak": 9, "other": 1}, "new": {"peak": 5}}), sep="\\n")
assert differences(golden, golden) == []
"""


def test_decreases_and_added_or_missing_rows_are_differences() -> None:
    result = run_process([sys.executable, "-c", DIFFERENCES], env=ENVIRONMENT, timeout=100, warm_processes=1)
    assert result.stdout.splitlines() == [
        "a: peak 10 -> 9 bytes.",
        "gone: the row is missing.",
        "new: the row is not in the golden file.",
    ], result.stderr


def test_update_requires_reason() -> None:
    before = (BENCHMARKS / "memory_golden.json").read_bytes()
    command = [sys.executable, BENCHMARKS / "memory_gate.py", "--update", "why"]
    result = run_process(command, env=ENVIRONMENT, warm_processes=1)
    assert result.returncode == 2 and "give a reason of a few words to --update" in result.stderr
    assert (BENCHMARKS / "memory_golden.json").read_bytes() == before
    assert all(len(change["reason"].split()) >= 3 for change in GOLDEN["changes"])
