"""Parts of `make gpu` in its short form, on the runtime without a device.

The build (which tests/benchmarks/test_gpu_machine.py configures), the sanitizers and the part "step", whose trace needs
CUPTI, are left to a GPU.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from support import cuda_runtime
from support.processes import run_process

pytestmark = pytest.mark.cuda_runtime
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("skip_kernels", "parts"),
    [(False, ["smoke", "tests", "kernels"]), (True, ["memory"])],
    ids=["values", "memory"],
)
def test_parts_run_without_a_gpu(tmp_path: Path, skip_kernels: bool, parts: list[str]) -> None:
    command = [sys.executable, "benchmarks/gpu", "--short", "--installed", "--parts", *parts]
    folders = ["--out", tmp_path / "results", "--work", tmp_path / "work"]
    environment = cuda_runtime.environment(devices=1, skip_kernels=skip_kernels)
    result = run_process([*command, *folders], env=environment, cwd=ROOT, timeout=400)
    results = json.loads((tmp_path / "results" / "results.json").read_text())
    assert result.returncode == 0, (result.stdout, (tmp_path / "results" / "log.txt").read_text()[-5000:])
    assert results["machine"]["gpu"] == "CUDA runtime without a device"
    assert (tmp_path / "results" / "gpu.md").is_file()
