"""Pictures of schedules and traces."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from support.ranks import on_ranks
from weft.strategy._plan import default_stages_per_rank, splits_backwards
from weft.strategy.pipeline import SCHEDULES, Action, Pipeline, Schedule, Span, draw


@pytest.mark.parametrize("kind", SCHEDULES)
def test_schedule_is_drawn_with_a_box_per_computation(kind, tmp_path):
    """The picture has a box for each computation and names ranks and kinds; drawing it again gives the same picture."""
    stages = default_stages_per_rank(kind)
    schedule = Schedule.generate(kind, 3, 5, stages_per_rank=stages)
    svg = draw(schedule, path=tmp_path / "schedule.svg")
    assert (tmp_path / "schedule.svg").read_text() == svg == draw(schedule)
    texts = [element.text for element in ElementTree.fromstring(svg).iter() if element.tag.endswith("text")]
    for action, color in {"F": "#8ecae6", "B": "#ffb703", "I": "#ffd166", "W": "#b7e4c7"}.items():
        num_boxes = sum(each.kind == action for actions in schedule.ranks for each in actions)
        assert svg.count(color) == (num_boxes + 2 if num_boxes else 0)  # the legend adds a face and an edge
    assert {"rank 0", "rank 2", "forward", "idle", "in flight", "1:4" if stages > 1 else "4"} <= set(texts)
    assert ("backward, weights" in texts) == splits_backwards(kind)
    bubble_fraction = schedule.simulate().bubble_fraction
    assert f"planned: {bubble_fraction:.0%} idle" in texts


def test_planned_above_measured_on_one_page(tmp_path):
    schedule = Schedule.generate("gpipe", 1, 1)
    measured = [[Span(Action(0, "F", 0), 0.1, 0.3), Span(Action(0, "B", 0), 0.5, 1.0)]]
    svg = draw(schedule, measured, path=tmp_path / "both.html")
    page = (tmp_path / "both.html").read_text()
    assert page.startswith("<!doctype html>") and page.endswith(svg[svg.index("<svg") :])
    assert svg.index("planned: 0% idle") < svg.index("measured: 30% idle")


def test_empty_input_raises(monkeypatch):
    for runs in ((None,), ([[]],), (Schedule.generate("gpipe", 1, 1), [[]])):
        with pytest.raises(ValueError, match="there is nothing to draw"):
            draw(*runs)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match="draw needs matplotlib"):
        draw(Schedule.generate("gpipe", 1, 1))


def test_documentation_figures_are_up_to_date():
    docs = Path(__file__).resolve().parents[3] / "docs"
    spec = importlib.util.spec_from_file_location("generate_pipeline", docs / "generate_pipeline.py")
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    for kind, svg in generator.figures().items():
        assert (docs / "pipeline" / f"{kind}.svg").read_text() == svg, "run make docs"
    text = generator.PAGE.read_text()
    assert generator.page(text) == text, "run make docs"


@on_ranks(2)
def test_traces_are_complete_and_on_a_common_clock(rank: int, world_size: int) -> None:
    """Every rank gets the computations of all ranks, in the order of their action lists."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    pipeline = Pipeline(model, init_device_mesh("cpu", (world_size,)), ["1"], num_micro_batches=3)
    pipeline.step(torch.ones(6, 4), lambda x: model(x).sum())
    traces = pipeline.traces()
    schedule = pipeline.schedule(3)
    for spans, actions in zip(traces, schedule.ranks, strict=True):
        assert [span.action for span in spans] == [action for action in actions if action.computes]
        assert all(0 <= a.start <= a.end <= b.start for a, b in itertools.pairwise(spans))
    # The times are on a common clock: a micro-batch's forward on stage 1 follows that on stage 0.
    ends = {str(span.action): span.end for spans in traces for span in spans}
    assert all(ends[f"0F{i}"] < ends[f"1F{i}"] < ends[f"1B{i}"] < ends[f"0B{i}"] for i in range(3))
    durations = [span.end - span.start for span in pipeline.trace]
    assert [span.end - span.start for span in traces[rank]] == pytest.approx(durations)
    assert "measured" in draw(schedule, traces)
