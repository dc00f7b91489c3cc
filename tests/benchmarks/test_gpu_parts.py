"""The parts of `make gpu` run on a CPU with small sizes, and the page of its results has their figures."""

from __future__ import annotations

import gzip
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.gpu_package import BENCHMARKS, ROOT, page

from support.processes import ProcessResult, run_process

PATHS = [str(BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])]
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join(PATHS),
    "CUDA_VISIBLE_DEVICES": "",
}


def run_python(*arguments: str, timeout: float = 300, warm_processes: int = 1) -> ProcessResult:
    command = [sys.executable, *arguments]
    return run_process(command, cwd=ROOT, env=ENVIRONMENT, timeout=timeout, warm_processes=warm_processes)


@pytest.mark.extended  # test_all_parts_but_the_build_pass_on_a_cpu has a short run of it
def test_smoke_passes_on_a_cpu(tmp_path: Path) -> None:
    output = tmp_path / "smoke.json"
    run = run_python("-m", "gpu.smoke", "--device", "cpu", "--output", str(output))
    assert run.returncode == 0, run.stdout + run.stderr
    rows = json.loads(output.read_text())["calls"]
    assert all(row["ok"] for row in rows)
    dtypes = {(row["operator"], row["dtype"]) for row in rows}
    for operator in ("column_row_mlp", "vocab_parallel_cross_entropy", "norm_backward", "cross_entropy_gradient"):
        assert {(operator, kind) for kind in ("float32", "float64", "bfloat16", "float16")} <= dtypes


WRONG = """
import sys
import torch
from gpu import smoke
from gpu.kernel_calls import KernelCall

run = KernelCall.run
def wrong(self, device, dtype=None):
    if dtype is None and self.name == "activation":
        raise RuntimeError("illegal address")
    results = run(self, device, dtype)
    return [each * 1.5 for each in results] if dtype is None and self.name == "norm" else results
KernelCall.run = wrong
sys.argv = ["smoke", "--device", "cpu", "--short", "--output", sys.argv[1]]
sys.exit(smoke.main())
"""


def test_smoke_finds_wrong_values_and_errors(tmp_path: Path) -> None:
    output = tmp_path / "smoke.json"
    run = run_python("-c", WRONG, str(output))
    assert run.returncode == 1, run.stdout + run.stderr
    wrong = {row["operator"] for row in json.loads(output.read_text())["calls"] if not row["ok"]}
    assert wrong == {"activation", "norm"}
    assert "activation float32: RuntimeError: illegal address" in run.stdout


def test_candidate_with_another_result_is_a_problem() -> None:
    code = "import torch, cuda_candidates as c; x = torch.ones(9); ways = {'a': lambda: x, 'b': lambda: [x * %s]}; "
    code += "sizes = c.Sizes(torch.device('cpu'), 1); print(c.measure_group(sizes, lambda sizes: {'job': ways}, 2))"
    assert "first_over_this" in run_python("-c", code % 1).stdout
    assert "b: norm 6.0, the first way's 3.0" in run_python("-c", code % 2).stdout


def test_suite_of_the_sanitizer_calls_every_kernel(tmp_path: Path) -> None:
    output = tmp_path / "memcheck.json"
    run = run_python("-m", "gpu.sanitize", "--device", "cpu", "--output", str(output))
    assert run.returncode == 0, run.stdout + run.stderr
    assert json.loads(output.read_text())["calls"] > 500
    code = "import torch, gpu.kernel_calls as k; print(*{call.name for call in k.kernel_calls(torch.float32)})"
    called = {f"_{name}" for name in run_python("-c", code).stdout.split()}
    # The private operators that call the launches which the headers declare.
    launched = set()
    for header in (ROOT / "kernels" / "cuda").glob("*_launch.h"):
        launched |= set(re.findall(r"^\w+ launch_(\w+)\(", header.read_text(), re.MULTILINE))
    operators = {"_norm" if name == "norm_forward" else f"_{name}" for name in launched}
    stems = {name.removesuffix("_of_shard") for name in called}
    assert operators and operators <= called | stems


FAKE_SANITIZER = """#!/bin/sh
if [ "$1" = --help ]; then echo "  --kernel-name arg"; exit 0; fi
echo "========= COMPUTE-SANITIZER"
while [ "$1" != --output ]; do last="$1"; case "$1" in --unknown) exit 5;; esac; shift; done
echo '{"calls": 12}' > "$2"
%s
"""


@pytest.mark.parametrize(
    ("lines", "errors", "status"),
    [
        ("echo '========= ERROR SUMMARY: 0 errors'", 0, 0),
        (
            "echo '========= Invalid read of size 4 bytes'; echo '========= ERROR SUMMARY: 3 errors'; exit 99",
            3,
            1,
        ),
        ("echo '========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)'; exit 99", 2, 1),
        ("echo '========= Error: device not supported'", None, 1),
    ],
)
def test_reports_of_the_sanitizer_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str, errors: int | None, status: int
) -> None:
    sanitizer = tmp_path / "compute-sanitizer"
    sanitizer.write_text(FAKE_SANITIZER % lines)
    sanitizer.chmod(0o755)
    monkeypatch.setitem(ENVIRONMENT, "PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    output = tmp_path / "memcheck.json"
    run = run_python("-m", "gpu.sanitize", "--tool", "memcheck", "--output", str(output))
    assert run.returncode == status, run.stdout + run.stderr
    result = json.loads(output.read_text())
    assert result["errors"] == errors and result["calls"] == 12
    assert ("problem" in result) == bool(status)


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """Return the report of benchmarks/block_step.py for the variant "weft" only, and its trace."""
    folder = tmp_path_factory.mktemp("step")
    small = ["--device", "cpu", "--model", "tiny", "--tokens", "8", "--samples", "2", "--variants", "weft", "--json"]
    files = ["--output", str(folder / "step.json"), "--trace", str(folder / "trace.json.gz")]
    run = run_python(str(BENCHMARKS / "block_step.py"), *small, *files)
    assert run.returncode == 0, run.stdout + run.stderr
    assert json.loads(run.stdout) == json.loads((folder / "step.json").read_text())
    return json.loads(run.stdout), folder / "trace.json.gz"


def test_step_runs_the_operators_of_weft(step: tuple[dict[str, Any], Path]) -> None:
    report, trace = step
    assert set(report["variants"]) == {"eager", "weft"} and report["failed"] == {}
    names = {each["name"] for each in report["variants"]["weft"]["longest_kernels"]}
    names |= {event.get("name") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    assert any("weft::" in str(name) for name in names), "weft's operators ran"
    assert not any("weft::" in each["name"] for each in report["variants"]["eager"]["longest_kernels"])


def test_page_has_the_figures(step: tuple[dict[str, Any], Path]) -> None:
    rows = [
        {"name": "step", "title": "A step", "status": "passed", "seconds": 3.4, "result": step[0]},
        {"name": "tests", "title": "Tests", "status": "failed", "seconds": 1.0, "result": {"selected": 1}},
        {"name": "racecheck", "title": "Races", "status": "skipped", "seconds": 0.0, "reason": "Missing: gpu."},
    ]
    facts = {"gpu": "H100", "gpu_bytes": 80 * 2**30, "multiprocessors": 132, "torch": "2.11.0", "nvcc": "13.0"}
    text = page.page_of({"machine": facts, "missing": ["there is no compiler."], "parts": rows, "short": True})
    assert "H100, 80 GiB, 132 multiprocessors" in text and "- there is no compiler." in text
    assert "| A step | passed | 3 |" in text and "| Races | skipped | 0 | Missing: gpu. |" in text
    assert re.search(r"^\| weft \| \d+\.\d\d \| \d+\.\d{3} \|", text, re.MULTILINE)
    assert "another form than expected (KeyError" in text and "This was a rehearsal" in text


def test_committed_page_is_that_of_the_committed_results() -> None:
    results = ROOT / "docs" / "benchmarks" / "gpu" / "results.json"
    report = json.loads(results.read_text()) if results.is_file() else None
    text = (ROOT / "docs" / "benchmarks" / "gpu.md").read_text()
    assert text == page.page_of(report), "run `python benchmarks/gpu --page`"
    assert ("Not run yet" in text) == (report is None)


def test_all_parts_but_the_build_pass_on_a_cpu(tmp_path: Path) -> None:
    """The part "tests" runs those that need no GPU."""
    out = tmp_path / "out"
    options = ["--short", "--device", "cpu", "--installed", "--out", str(out), "--work", str(tmp_path / "work")]
    command = [str(BENCHMARKS / "gpu"), *options, "--seconds", "540"]
    run = run_python(*command, timeout=570, warm_processes=0)  # each part is a new interpreter, as for a user
    report = json.loads((out / "results.json").read_text())
    statuses = {part["name"]: part["status"] for part in report["parts"]}
    log = (out / "log.txt").read_text()
    assert statuses == dict.fromkeys(statuses, "passed"), f"{run.stdout}\n{log[-6000:]}"
    assert list(statuses) == ["smoke", "tests", "kernels", "candidates", "memory", "step", "memcheck", "racecheck"]
    assert {path.name for path in out.iterdir()} == {"results.json", "gpu.md", "log.txt", "tests.xml", "trace.json.gz"}
    text = (out / "gpu.md").read_text()
    assert "another form than expected" not in text
    for heading in (
        "Kernels",
        "Ways to compute the same result",
        "Memory of a rank",
        "A training step of Llama-shaped blocks",
    ):
        assert f"\n## {heading}\n" in text
