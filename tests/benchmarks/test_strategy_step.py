"""The benchmark of full training steps runs, its candidates agree, and its limits detect regressions."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from support.processes import run_process

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
PATHS = [str(BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(PATHS)}

SMALL = """
import json, sys
from strategy_step import CANDIDATES, Size, rows_of
for name in set(CANDIDATES) - {"stock", "weft"}:
    del CANDIDATES[name]
print(json.dumps(rows_of(Size(32, 16, 2, num_layers=2), sys.argv[1], 2)))
"""


@pytest.mark.parametrize("layout", ["tp2", "dp2"])
def test_small_row_has_all_figures(layout: str) -> None:
    result = run_process([sys.executable, "-c", SMALL, layout], env=ENVIRONMENT, timeout=200, warm_processes=1)
    assert result.returncode == 0, result.stderr[-3000:]
    stock, ours = json.loads(result.stdout.splitlines()[-1])
    assert (stock["candidate"], stock["ratio"], ours["candidate"]) == ("stock", 1.0, "weft")
    assert ours["ratio"] > 0 and ours["median_seconds"] > 0
    assert stock["peak_by_category"]["communication"] == 0 < ours["peak_by_category"]["communication"]
    for row in (stock, ours):
        categories = row["peak_by_category"]
        assert row["peak_bytes_without_communication"] == sum(categories.values()) - categories["communication"]
        assert categories["optimizer_state"] >= 2 * categories["gradients"]
    # The time of stock's peak varies: gloo's threads free the input of a reduction asynchronously.
    assert ours["peak_by_category"]["gradients"] > 0 < stock["peak_by_category"]["optimizer_state"]


FAILURES = """
from strategy_step import failures

def row(candidate, dim, ratio, noise, peak):
    return dict(layout="tp2", dim=dim, candidate=candidate, ratio=ratio, noise=noise,
                peak_bytes=peak)

rows = [row("stock", 128, 1.0, 0.0, 10), row("weft", 128, 0.6, 0.05, 9), row("weft_on_gloo", 128, 2.0, 0.0, 10),
        row("stock", 512, 1.0, 0.0, 10), row("weft", 512, 1.04, 0.05, 9)]
print(*failures(rows), sep="\\n")
"""


def test_rows_beyond_limits_are_failures() -> None:
    result = run_process([sys.executable, "-c", FAILURES], env=ENVIRONMENT, timeout=100, warm_processes=1)
    assert result.stdout.splitlines() == [
        "tp2, dim 128, weft: 0.600 of stock's time, wanted 0.5 (noise 0.050).",
        "tp2, dim 128, weft_on_gloo: a peak of 10 bytes, wanted less than stock's 10.",
    ], result.stderr
