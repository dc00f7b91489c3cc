"""benchmarks/pretrained.py on a small model: its bounds of memory and bytes hold, and a missed bound is reported."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from support.processes import run_process

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(BENCHMARKS)}


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, Any]]:
    """Return the rows by kind, from one process, whose imports take longer than a row."""
    command = [sys.executable, BENCHMARKS / "pretrained.py", "--small", "--kinds", "tp", "dp", "--ranks", "2"]
    result = run_process(
        [*command, "--samples", "1", "--json"], env=ENVIRONMENT, timeout=400, has_optional_packages=True
    )
    assert result.returncode == 0, result.stderr
    return {row["kind"]: row for row in json.loads(result.stdout)["results"]}


@pytest.mark.parametrize("kind", ["tp", "dp"])
def test_small_rows_hold_their_bounds(rows: dict[str, dict[str, Any]], kind: str) -> None:
    row = rows[kind]
    assert len(row["ranks"]["weft"]) == len(row["ranks"]["full"]) == 2
    # The times of a small model are those of planning.
    assert [each for each in row["misses"] if not each.startswith("loading: ")] == []
    for ours, full in zip(row["ranks"]["weft"], row["ranks"]["full"], strict=True):
        assert 0.9 * ours["shard"] <= ours["read"] <= 1.05 * ours["shard"] < 0.6 * full["shard"]
        assert ours["shard"] <= ours["counted"] < full["counted"]


MISSES = """
import pretrained
figures = {"counted": 50 << 20, "anonymous": 300 << 20, "read": 12 << 20, "shard": 10 << 20, "largest": 1 << 20}
row = {"ranks": {"weft": [figures]}, "medians": {"weft loading": 1.4, "file": 1.0}}
print(*pretrained.misses(row), sep="\\n")
"""


def test_missed_bounds_are_reported() -> None:
    result = run_process([sys.executable, "-c", MISSES], env=ENVIRONMENT, timeout=100, warm_processes=1)
    assert result.stdout.splitlines() == [
        "rank 0: counted 52.4 MB, bound 28.3 MB",
        "rank 0: anonymous 314.6 MB, bound 238.0 MB",
        "rank 0: read 12.6 MB, bound 11.0 MB",
        "loading: 1.40 of reading the file, bound 1.3",
    ], result.stderr
