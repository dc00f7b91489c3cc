"""Draws schedules and runs: the actions of each rank over time, and the number of micro-batches in flight."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weft.strategy._plan import Schedule, Simulation, Span

_COLORS = {"F": "#8ecae6", "B": "#ffb703", "I": "#ffd166", "W": "#b7e4c7"}
_NAMES = {"F": "forward", "B": "backward", "I": "backward, inputs", "W": "backward, weights"}
_IDLE = "#eeeeee"
_MIN_LABEL_WIDTH = 0.011  # of the full width: narrower boxes have no text
_ROW_HEIGHT, _IN_FLIGHT_HEIGHT = 0.32, 1.3  # inches of a rank's row, and of the chart under a timeline

Runs = Schedule | Simulation | Sequence[Sequence[Span]]


def draw(planned: Runs | None, measured: Runs | None = None, *, path: str | Path | None = None) -> str:
    """Draw a timeline for each rank and, below it, the micro-batches in flight; planned above measured.

    A box is one computation; a wide one is labelled by its stage (if the rank has several) and its micro-batch.
    Grey is idle time.

    Args:
        planned: a schedule (drawn as if each stage took 1 for a forward and 1 for each half of a backward), a
            simulation, or each rank's spans. None: draw only `measured`.
        measured: each rank's spans, as `Pipeline.traces` returns them.
        path: the file to write, if given: the SVG, or, if the name ends in ".html", an HTML page that contains the SVG.

    Returns:
        The SVG.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: neither is given, or one has no spans.
    """
    runs = [(title, _spans(run)) for title, run in (("planned", planned), ("measured", measured)) if run is not None]
    if not runs or not all(any(ranks) for _, ranks in runs):
        raise ValueError("draw: there is nothing to draw; pass a schedule, a simulation or traces that have spans.")
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("draw needs matplotlib, which is not installed; install it.") from error
    from matplotlib.figure import Figure

    heights = [height for _, ranks in runs for height in (_ROW_HEIGHT * len(ranks) + 0.2, _IN_FLIGHT_HEIGHT)]
    # Equal runs give equal files; text is stored as text.
    with matplotlib.rc_context({"svg.hashsalt": "weft", "svg.fonttype": "none", "font.size": 8}):
        figure = Figure(figsize=(12, sum(heights) + 0.6 * len(heights)), layout="constrained")
        axes = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
        for i, (title, ranks) in enumerate(runs):
            end = max(span.end for spans in ranks for span in spans)
            unit = "s" if title == "measured" else "steps"
            _draw_timeline(axes[2 * i], ranks, end, f"{title}: {_idle_share(ranks, end):.0%} idle")
            _draw_in_flight(axes[2 * i + 1], ranks, end, unit)
        figure.legend(handles=_legend(runs), loc="outside lower center", ncols=len(_COLORS) + 1)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    svg = buffer.getvalue()
    if path is not None:
        is_page = Path(path).suffix == ".html"
        page = f"<!doctype html><meta charset=utf-8><title>Pipeline</title>{svg[svg.index('<svg') :]}"
        Path(path).write_text(page if is_page else svg)
    return svg


def _spans(run: Runs) -> Sequence[Sequence[Span]]:
    if isinstance(run, Schedule):
        run = run.simulate()
    return run.ranks if isinstance(run, Simulation) else run


def _idle_share(ranks: Sequence[Sequence[Span]], end: float) -> float:
    busy = sum(span.end - span.start for spans in ranks for span in spans)
    return 1 - busy / (end * len(ranks)) if end > 0 else 0.0


def _draw_timeline(axes: Any, ranks: Sequence[Sequence[Span]], end: float, title: str) -> None:
    for rank, spans in enumerate(ranks):
        axes.broken_barh([(0, end)], (rank - 0.4, 0.8), facecolor=_IDLE)
        has_several_stages = len({span.action.stage for span in spans}) > 1
        for span in spans:
            width = span.end - span.start
            color = _COLORS[span.action.kind]
            axes.broken_barh(
                [(span.start, width)], (rank - 0.4, 0.8), facecolor=color, edgecolor="white", linewidth=0.5
            )
            if width >= _MIN_LABEL_WIDTH * end:
                stage = f"{span.action.stage}:" if has_several_stages else ""
                position = (span.start + width / 2, rank)
                axes.text(
                    *position, f"{stage}{span.action.micro_batch}", ha="center", va="center", fontsize=6, clip_on=True
                )
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in range(len(ranks))])
    axes.invert_yaxis()
    axes.set_xlim(0, end)
    axes.set_title(title, loc="left")


def _draw_in_flight(axes: Any, ranks: Sequence[Sequence[Span]], end: float, unit: str) -> None:
    has_backward = any(span.action.kind != "F" for spans in ranks for span in spans)
    for rank, spans in enumerate(ranks):
        times, counts = [0.0], [0]
        for span in spans:
            if not has_backward:  # an evaluation: a micro-batch is in flight only during its forward
                times += [span.start, span.end]
                counts += [1, 0]
                continue
            change = {"F": 1, "B": -1, "W": -1}.get(span.action.kind, 0)
            times.append(span.start if change > 0 else span.end)
            counts.append(counts[-1] + change)
        axes.step([*times, end], [*counts, counts[-1]], where="post", linewidth=1, label=f"rank {rank}")
    axes.set_xlim(0, end)
    axes.set_ylim(bottom=0)
    axes.set(xlabel=unit, ylabel="in flight")
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.legend(fontsize=6, ncols=4, loc="upper right")


def _legend(runs: Sequence[tuple[str, Sequence[Sequence[Span]]]]) -> list[Any]:
    from matplotlib.patches import Patch

    kinds = {span.action.kind for _, ranks in runs for spans in ranks for span in spans}
    patches = [Patch(color=color, label=_NAMES[kind]) for kind, color in _COLORS.items() if kind in kinds]
    return [*patches, Patch(color=_IDLE, label="idle")]
