"""The report of a run in headless Chromium, if it is installed: at the width of a desktop and of a phone."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from strategy.test_report_page import data

from weft.strategy.reports.page import page

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium or google-chrome on the PATH")

# The script reports sizes from a frame, because the window of a browser has a least width above that of a phone.
MEASURE = """<script>addEventListener("load", () => parent.postMessage(
  [innerWidth, document.documentElement.scrollWidth, document.querySelectorAll("svg").length], "*"))</script>"""
FRAME = """<body style="margin:0"><iframe src="report.html" width="{width}" height="900" style="border:0"></iframe>
<script>addEventListener("message", event => document.title = JSON.stringify(event.data))</script>"""


def _report() -> dict[str, Any]:
    """Return a report with each kind of chart, and with long names."""
    phases = [[f"step 3 phase {i}", {"parameters": 60 + i, "scratch": 40 * i}] for i in range(20)]
    ranks = [{**rank, "memory": {**rank["memory"], "phases": phases}} for rank in data()["ranks"]]
    points = [{"step": i, "values": {"train_loss_with_a_long_name": 1 / (i + 1), "seconds": 0.5}} for i in range(50)]
    parameter = {"style": "column", "rule": "model.layers.*.self_attn.*", "local_shape": [1024, 4096], "note": "a note"}
    name = "model.layers.{}.self_attn.a_projection_with_a_long_name.weight"
    parameters = [
        {**parameter, "parameter": name.format(i), "axes": {"tensor_parallel": 0}, "num_bytes": 1 << 24}
        for i in range(30)
    ]
    plan = [{"ranks": [0, 1], "parameters": parameters, "notes": ["a note " * 30]}]
    return data(ranks=ranks, points=points, plan=plan, warnings=["a warning " * 30])


def _run(*options: str) -> str:
    assert CHROMIUM is not None
    fixed = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=3000")
    done = subprocess.run([CHROMIUM, *fixed, *options], capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


@pytest.mark.parametrize("width", [1280, 390], ids=["desktop", "phone"])
def test_page_fits_into_the_window(tmp_path: Path, width: int) -> None:
    (tmp_path / "report.html").write_text(page(_report()) + MEASURE)
    frame = tmp_path / "frame.html"
    frame.write_text(FRAME.format(width=width))
    found = re.search(r"<title>(.*?)</title>", _run("--window-size=1400,1000", "--dump-dom", frame.as_uri()))
    assert found is not None
    inner, content, num_charts = json.loads(found[1])
    assert inner == width and content <= width and num_charts >= 3


def test_dark_mode_is_dark(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    report = tmp_path / "report.html"
    report.write_text(page(_report()))
    brightness = {}
    for scheme in (0, 1):  # dark, light
        picture = tmp_path / f"{scheme}.png"
        _run(f"--blink-settings=preferredColorScheme={scheme}", f"--screenshot={picture}", report.as_uri())
        counts = image.open(picture).convert("L").histogram()  # of each of 256 grey levels
        brightness[scheme] = sum(level * count for level, count in enumerate(counts)) / sum(counts)
        assert sum(map(bool, counts)) > 10  # something is drawn
    assert brightness[0] < 80 and brightness[1] > 200
