"""Makes the package `gpu` of benchmarks/ importable, and parts of a run that need no GPU."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"

with pytest.MonkeyPatch.context() as search_path:
    search_path.syspath_prepend(str(BENCHMARKS))
    from gpu import build, machine, page, parts, processes, results, run, test_records

__all__ = ["build", "machine", "page", "parts", "processes", "results", "run", "test_records"]


def python_part(name: str, code: str, **options: object) -> parts.Part:
    """Return a part that runs Python code."""
    settings = {"share_seconds": 10.0, "most_seconds": 60.0, "needs_build": False, **options}
    return parts.Part(name, name.title(), (sys.executable, "-c", code), **settings)


def run_of(
    tmp_path: Path,
    chosen: list[parts.Part],
    *,
    total_seconds: float = 120.0,
    missing: dict[str, str] | None = None,
    has_package: bool = True,
    measured: dict[str, str] | None = None,
) -> run.Run:
    """Return a run of these parts; results go to TMP_PATH/out."""
    work = tmp_path / "work"
    work.mkdir()
    kept = results.Results(
        tmp_path / "out", {"benchmark": "gpu"}, tuple(name for part in chosen for name in part.files)
    )
    return run.Run(
        chosen,
        machine.Machine(missing=missing or {}),
        kept,
        work,
        total_seconds=total_seconds,
        scale=1.0,
        environment=dict(os.environ),
        measured_environment=measured or {},
        has_package=lambda: has_package,
    )
