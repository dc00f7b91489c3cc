"""Installs weft with `cmake --install` and builds other CMake projects against it."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

from support.processes import ProcessResult, run_process

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("WEFT_BUILD_DIR", ROOT / "build" / "dev")).resolve()
CMAKE = Path(sys.executable).with_name("cmake")


def install(prefix: Path) -> Path:
    """Install the build in BUILD under `prefix`, which is emptied first, and return `prefix`."""
    assert (BUILD / "CMakeCache.txt").is_file(), f"{BUILD} is no build folder: run `make build` or set WEFT_BUILD_DIR"
    shutil.rmtree(prefix, ignore_errors=True)
    result = run_process([CMAKE, "--install", BUILD, "--prefix", prefix], timeout=60)
    assert result.returncode == 0, result.stderr
    return prefix


def configure(source: Path, build: Path, prefix: Path, *options: str) -> ProcessResult:
    """Configure the project in `source` with the tools that built weft and this interpreter's torch."""
    tools = [f"-D{name}={_cached(name)}" for name in ("CMAKE_CXX_COMPILER", "CMAKE_MAKE_PROGRAM")]
    locations = [f"-DCMAKE_PREFIX_PATH={prefix}", f"-DPython_EXECUTABLE={sys.executable}"]
    command = [CMAKE, "-G", _cached("CMAKE_GENERATOR"), "-S", source, "-B", build, *tools, *locations, *options]
    return run_process(command, timeout=120)


def build_project(source: Path, build: Path, prefix: Path, *options: str, timeout: float = 480) -> None:
    result = configure(source, build, prefix, *options)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    jobs = os.environ.get("MAX_JOBS", str(os.cpu_count()))
    result = run_process([CMAKE, "--build", build, "--parallel", jobs], timeout=timeout)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"


def _cached(name: str) -> str:
    found = re.search(rf"^{name}:\w+=(.*)$", (BUILD / "CMakeCache.txt").read_text(), re.MULTILINE)
    assert found is not None, f"{name} is not in the cache of {BUILD}"
    return found[1]
