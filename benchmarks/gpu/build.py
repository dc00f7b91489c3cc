"""Builds weft for one GPU, offline and without an environment, into a package folder for PYTHONPATH.

    PYTHONPATH=benchmarks python3 -m gpu.build --work build/gpu --architecture 9.0 --jobs 16

The folder WORK/site contains the packages like site-packages: links to the Python files of the source tree, next to the
compiled libraries. The build needs cmake, ninja, a C++20 compiler, nvcc, torch and pybind11; no GoogleTest, because the
tests that need the GPU are Python tests.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu.machine import cuda_tool, tool

ROOT = Path(__file__).resolve().parents[2]
_IMPORT = "import weft, weft.strategy; print(weft.__file__)"


def site_of(work: Path) -> Path:
    """Return the folder that the parts have on PYTHONPATH."""
    return work / "site"


def has_package(work: Path) -> bool:
    """Return whether the libraries are built. Does not import them, because this process may lack torch."""
    return any(site_of(work).glob("weft/lib/libweft_ops.so")) and any(site_of(work).glob("weft/strategy/_plan*.so"))


def lay_out_packages(site: Path) -> None:
    """Link the Python files of the source tree into the package folders."""
    path = ROOT / "docs" / "site" / "package_layout.py"
    spec = importlib.util.spec_from_file_location("package_layout", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.lay_out_packages(site)


def configure_command(work: Path, cuda: bool, environment: dict[str, str]) -> list[str]:
    """Return the command that configures the preset `gpu` into WORK/cmake."""
    site = site_of(work)
    defined = {
        "Python_EXECUTABLE": sys.executable,
        "WEFT_PACKAGE_DIR": site / "weft",
        "WEFT_STRATEGY_PACKAGE_DIR": site / "weft" / "strategy",
        "WEFT_CUDA": "ON" if cuda else "OFF",
    }
    cmake, ninja = tool("cmake", environment), tool("ninja", environment)
    if ninja is not None:
        defined["CMAKE_MAKE_PROGRAM"] = ninja
    return [cmake or "cmake", "--preset", "gpu", "-B", str(work / "cmake"), *(f"-D{k}={v}" for k, v in defined.items())]


def build_environment(architecture: str | None, environment: dict[str, str]) -> dict[str, str]:
    """Return the environment with the GPU's architecture, and with nvcc on PATH."""
    result = dict(environment)
    if architecture is not None:
        result["TORCH_CUDA_ARCH_LIST"] = architecture
        nvcc = cuda_tool("nvcc", environment)
        if nvcc is not None:
            result["PATH"] = os.pathsep.join([str(Path(nvcc).parent), environment.get("PATH", os.defpath)])
    return result


def slowest_compilations(ninja_log: Path, count: int = 12) -> list[tuple[str, float]]:
    """Return the outputs with the longest compilations, each with the wall-clock seconds of its compilation."""
    if not ninja_log.is_file():
        return []
    seconds: dict[str, float] = {}
    for line in ninja_log.read_text().splitlines():
        fields = line.split("\t")
        if len(fields) == 5:
            seconds[fields[3].rpartition("/")[2]] = (int(fields[1]) - int(fields[0])) / 1e3
    return sorted(seconds.items(), key=lambda item: -item[1])[:count]


def build(work: Path, architecture: str | None, jobs: int, output: Path | None) -> int:
    """Configure and build; write the times as JSON. Return an exit status."""
    work.mkdir(parents=True, exist_ok=True)
    environment = build_environment(architecture, dict(os.environ))
    report: dict[str, Any] = {"architecture": architecture or "no GPU", "jobs": jobs}
    lay_out_packages(site_of(work))
    configure = configure_command(work, architecture is not None, environment)
    steps: dict[str, Sequence[str]] = {
        "configure_seconds": configure,
        "build_seconds": [configure[0], "--build", str(work / "cmake"), "--parallel", str(jobs)],
        "import_seconds": [sys.executable, "-c", _IMPORT],
    }
    status = 0
    for name, command in steps.items():
        if name == "import_seconds":
            environment["PYTHONPATH"] = str(site_of(work))
        start = time.monotonic()
        status = status or subprocess.run(command, cwd=ROOT, check=False, env=environment).returncode
        report[name] = round(time.monotonic() - start, 1)
        report["slowest"] = slowest_compilations(work / "cmake" / ".ninja_log")
        if output is not None:
            output.write_text(json.dumps(report))
        if status:
            break
    return 1 if status else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "gpu", metavar="FOLDER", help="for all outputs")
    parser.add_argument("--architecture", help="the GPU's, such as 9.0; without it, no CUDA sources are compiled")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="parallel compilers")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the times as JSON")
    args = parser.parse_args()
    return build(args.work.resolve(), args.architecture, args.jobs, args.output)


if __name__ == "__main__":
    sys.exit(main())
