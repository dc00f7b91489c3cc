"""The report of benchmarks/latency.py: percentiles, limits, tables and pictures, from rows without ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def report_module() -> Any:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import latency_report
    finally:
        sys.path.remove(str(BENCHMARKS))
    return latency_report


def side(us: list[float], shared: float = 0.0) -> dict[str, Any]:
    return {"us": us, "shared": shared, "switches": [0.5, 0.25]}


def row(weft: list[float], gloo: list[float], **facts: Any) -> dict[str, Any]:
    facts = {"condition": "back_to_back", "call": "all_reduce", "num_bytes": 4096} | facts
    return facts | {"weft": side(weft), "gloo": side(gloo)}


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([3.0, 1.0, 2.0], 50, 2.0),
        ([4.0, 3.0, 2.0, 1.0], 50, 2.0),
        ([float(value) for value in range(1, 101)], 99, 99.0),
        ([float(value) for value in range(1, 102)], 99, 100.0),
        ([7.0], 99, 7.0),
    ],
)
def test_a_percentile_is_the_least_value_that_covers_its_share(
    report_module: Any, values: list[float], percent: int, expected: float
) -> None:
    assert report_module.percentile(values, percent) == expected


def test_percentiles_count_every_call_and_medians_every_set(report_module: Any) -> None:
    sets = [[row([10.0, 12.0, 14.0], [90.0] * 3)], [row([100.0, 20.0, 16.0], [90.0] * 3)]]
    (combined,) = report_module.combine(2, sets)
    assert combined["num_ranks"] == 2
    assert combined["weft"]["p50"] == 14.0
    assert (combined["weft"]["max"], combined["weft"]["num_calls"]) == (100.0, 6)
    assert combined["weft"]["medians_of_sets"] == [12.0, 20.0]
    assert combined["gloo_over_weft"] == round(90 / 14, 2)
    # P50 at most 15 and P99 at most 60 in the first set only.
    assert combined["sets_within"] == [1, 2]
    assert sum(combined["weft"]["histogram"].values()) == 6


def test_a_histogram_has_four_bins_for_each_factor_of_two(report_module: Any) -> None:
    edges = [2 ** (idx / 4) for idx in range(12)]
    values = [edge * 1.01 for edge in edges] + [edges[5] * 1.02]
    counts = report_module.histogram(values)
    assert list(counts.values()) == [1, 1, 1, 1, 1, 2, 1, 1, 1, 1, 1, 1]
    assert [float(lower) for lower in counts] == pytest.approx(edges, rel=5e-3)
    assert report_module.histogram([0.0, -1.0]) == {"0.125": 2}  # clocks of ranks may differ by some nanoseconds


def test_bins_between_calls_are_drawn_as_empty(report_module: Any) -> None:
    edges, shares = report_module._steps(report_module.histogram([1.0, 1.0, 2.0, 2.9]), 4)
    assert edges == pytest.approx([2 ** (idx / 4) for idx in range(8)])
    assert shares == [50.0, 0.0, 0.0, 0.0, 25.0, 0.0, 25.0, 0.0]


def test_each_limit_is_one_sentence(report_module: Any) -> None:
    fast = report_module.combine(2, [[row([10.0], [1000.0])]])
    assert report_module.failures(fast) == []
    slow = report_module.combine(2, [[row([16.0], [1000.0])]])
    assert report_module.failures(slow) == [
        "all_reduce of 4096 bytes on 2 ranks, back_to_back: P50 is 16.0 us, wanted at most 15.",
        "all_reduce of 4096 bytes on 2 ranks, back_to_back: 0 of 1 sets are within P50 of 15 us and P99 of 60 us, "
        "wanted 95%.",
    ]
    late = report_module.combine(4, [[row([201.0], [1000.0], condition="skewed")]])
    assert report_module.failures(late) == [
        "all_reduce of 4096 bytes on 4 ranks, skewed: P50 is 201.0 us, wanted at most 200."
    ]
    even = report_module.combine(4, [[row([100.0], [999.0], num_bytes=256 * 1024, condition="skewed")]])
    assert report_module.failures(even) == [
        "all_reduce of 262144 bytes on 4 ranks, skewed: gloo / weft is 9.99, wanted at least 10."
    ]
    other = report_module.combine(2, [[row([1000.0], [1.0], call="all_gather")]])
    assert report_module.failures(other) == []


def test_a_table_has_a_column_for_each_condition(report_module: Any, capsys: pytest.CaptureFixture[str]) -> None:
    sets = [[row([16.0, 18.0], [320.0, 400.0]), row([30.0], [60.0], condition="busy")]]
    machine = {"cpu": "A processor", "cpus_usable": 2, "torch": "2.15.0", "date": "2026-12-01"}
    report_module.print_table({"machine": machine, "results": report_module.combine(2, sets)})
    assert capsys.readouterr().out.splitlines() == [
        "A processor, 2 cores, torch 2.15.0, 2026-12-01",
        "",
        "### 2 ranks",
        "",
        "| call | size | back to back | busy |",
        "|---|---|---|---|",
        "| all_reduce | 4 KiB | 16, 18; 20.0 x | 30, 30; 2.0 x |",
    ]


def test_a_report_is_read_from_a_file(report_module: Any, tmp_path: Path) -> None:
    sets = [[row([16.0, 17.0], [300.0, 400.0]), row([5.0], [50.0], call="barrier", num_bytes=0, condition="busy")]]
    machine = {"cpu": "A processor", "cpus_usable": 2, "torch": "2.15.0", "date": "2026-12-01"}
    report = {"benchmark": "latency", "machine": machine, "num_sets": 1, "results": report_module.combine(2, sets)}
    source = tmp_path / "latency.json"
    source.write_text(json.dumps(report))
    options = ["--from", str(source), "--details", "--check", "--pictures", str(tmp_path)]
    command = [sys.executable, str(BENCHMARKS / "latency.py"), *options]
    run = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert run.returncode == 1, run.stderr
    assert "P50 is 16.0 us, wanted at most 15." in run.stderr
    lines = run.stdout.splitlines()
    assert lines[0] == "A processor, 2 cores, torch 2.15.0, 2026-12-01"
    cells = "16.0 | 17.0 | 17.0 | 17.0 | 16.5 to 16.5 | 0% | 0.5 + 0.25 | 300.0 | 400.0 | 18.8"
    assert lines[-2] == f"| all_reduce | 4 KiB | back to back | {cells} |"
    assert lines[-1].startswith("| barrier | - | busy | 5.0 |")
    pictures = {path.name: path.read_text() for path in tmp_path.glob("*.svg")}
    assert set(pictures) == {"latency_2_all_reduce.svg", "latency_2_barrier.svg"}
    assert "Histograms of the microseconds of barrier on 2 ranks" in pictures["latency_2_barrier.svg"]
