"""The charts and warnings of a run's report."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from weft.strategy.reports import run_data
from weft.strategy.reports.charts import areas, bars, lines, num_bytes, number, seconds, ticks, timeline
from weft.strategy.reports.page import idle_fraction, page


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 7.0, [0.0, 2.0, 4.0, 6.0, 8.0]),
        (0.61, 0.89, [0.6, 0.7, 0.8, 0.9]),
        (-3.0, 5.0, [-4.0, -2.0, 0.0, 2.0, 4.0, 6.0]),
        (1.2e9, 1.2e9, [1e9, 1.5e9, 2e9, 2.5e9]),
        (0.3, 0.3 + 5e-17, [0.3, 0.4, 0.5, 0.6]),
    ],
)
def test_ticks_are_round_and_enclose_the_values(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)
    assert ticks(low, high)[0] <= low + 1e-15 and ticks(low, high)[-1] >= high


def test_numbers_have_units() -> None:
    assert [number(value) for value in (0.0, 0.012346, 1234.6, 3.2e6, 123456)] == [
        "0",
        "0.01235",
        "1,235",
        "3,200,000",
        "123,456",
    ]
    assert [num_bytes(value) for value in (12, 1536, 2.5e6, 1.5e9, 3e12)] == [
        "12 B",
        "1.536 kB",
        "2.5 MB",
        "1.5 GB",
        "3 TB",
    ]
    assert [seconds(value) for value in (1.5, 0.0125, 3e-6)] == ["1.5 s", "12.5 ms", "3 µs"]


def test_line_goes_through_its_points() -> None:
    """The axis of 0 to 100 is 240 units high and 1000 wide; points without a value are left out."""
    drawn = lines("loss", {"a": [(0, 0.0), (5, float("nan")), (10, 100.0)]}, "step")
    assert re.findall(r'points="([^"]*)"', drawn) == ["0.0,240.0 1000.0,0.0"]
    assert lines("loss", {"a": []}, "step") == ""


def test_layers_lie_on_each_other() -> None:
    drawn = areas("memory", ["begin", "end"], {"a": [4.0, 8.0], "b": [4.0, 0.0]}, number)
    outlines = re.findall(r'<polygon class="f(\d)" points="([^"]*)"', drawn)
    assert outlines == [
        ("0", "0.0,120.0 1000.0,0.0 1000.0,240.0 0.0,240.0"),
        ("1", "0.0,0.0 1000.0,0.0 1000.0,0.0 0.0,120.0"),
    ]


def test_bars_share_a_scale_with_their_marks() -> None:
    drawn = bars(
        "peak", [("rank 0", {"a": 30.0, "b": 10.0}), ("rank 1", {"b": 20.0})], number, [80.0, None], "predicted"
    )
    assert re.findall(r'class="b(\d)" style="width:([\d.]+)%"', drawn) == [
        ("0", "37.50"),
        ("1", "12.50"),
        ("1", "25.00"),
    ]
    assert re.findall(r'class="mark" style="left:([\d.]+)%"', drawn) == ["100.00"]
    assert "<span>40</span>" in drawn


def test_boxes_are_at_their_times() -> None:
    drawn = timeline(
        "measured", [("rank 0", [(1.0, 2.0, "0", "<forward>", 0)]), ("rank 1", [(2.0, 4.0, "1", "", 1)])], seconds
    )
    assert re.findall(r"left:([\d.]+)%;width:([\d.]+)%", drawn) == [("25.000", "25.000"), ("50.000", "50.000")]
    assert "&lt;forward&gt;" in drawn and "<forward>" not in drawn


def data(**changes: Any) -> dict[str, Any]:
    run = {"module": "<module>", "status": "Training ended.", "layout": "dp2", "num_ranks": 2, "num_steps": 4}
    rank = {
        "stages": [],
        "memory": {"peak": {"parameters": 60, "scratch": 40}, "phases": []},
        "times": {"compute": 0.8, "wait": 0.2, "loader": 0.0},
        "communication": {"axes": {}, "is_truncated": False},
    }
    return {
        "version": 1,
        "run": {**run, "mesh": [["data_parallel", 2]], "summary": ["a <line>"], "facts": {"host": "<fact>"}},
        "points": [{"step": 2, "values": {"mean loss": None, "<value>": 1.0, "seconds": 0.5}}],
        "ranks": [{"rank": i, **rank} for i in range(2)],
        "memory": {"predicted": 100},
        "pipeline": None,
        "plan": [],
        "warnings": [],
        **changes,
    }


def test_texts_of_the_run_are_escaped(tmp_path: Path) -> None:
    text = page(data())
    for tag in ("module", "line", "fact", "value"):
        assert f"<{tag}>" not in text and f"&lt;{tag}&gt;" in text


def test_usual_run_has_no_warning(tmp_path: Path) -> None:
    run_data.write(tmp_path, data())
    assert run_data.read(tmp_path)["warnings"] == []


def _waiting(share: float) -> list[dict[str, Any]]:
    times = {"compute": 1 - share, "wait": share, "loader": 0.0}
    return [{**rank, "times": times} for rank in data()["ranks"]]


USED_MORE = [{**rank, "memory": {"peak": {"scratch": 8e6 * rank["rank"]}, "phases": []}} for rank in data()["ranks"]]
IDLE = {"planned": [], "measured": [[["F", 0, 0, 0.0, 1.0]], [["F", 1, 0, 1.0, 2.0], ["SEND_B", 1, 0, 0.0, 1.0]]]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": USED_MORE}, "Rank 1 used 8 MB, more than the 100 B predicted: compare "),
        ({"ranks": _waiting(0.5)}, "Every rank waits in communication for at least 50% of a step: try "),
        ({"pipeline": IDLE}, "The ranks of the pipeline are idle for 50% of a step: use more micro-batches"),
    ],
)
def test_unusual_runs_have_a_warning(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = run_data.write(tmp_path, data(**changes))
    assert run_data.read(tmp_path)["warnings"][0].startswith(message)
    assert message in path.read_text()


def test_idle_time_leaves_communication_out() -> None:
    assert idle_fraction(IDLE["measured"]) == 0.5
