"""Writes the timelines of docs/schedules.md: `make docs`."""

from __future__ import annotations

import sys
from pathlib import Path

from weft.strategy._plan import default_stages_per_rank
from weft.strategy.pipeline import SCHEDULES, Schedule, StageCost, draw

DOCS = Path(__file__).resolve().parent
PAGE = DOCS / "schedules.md"
FOLDER = DOCS / "pipeline"
BEGIN = "<!-- figures: written by docs/generate_pipeline.py -->\n"
END = "<!-- end of figures -->\n"
NUM_RANKS, NUM_MICRO_BATCHES = 4, 8


def figures() -> dict[str, str]:
    """Return the SVG of each kind of schedule."""
    result = {}
    for kind in SCHEDULES:
        stages = default_stages_per_rank(kind)
        schedule = Schedule.generate(kind, NUM_RANKS, NUM_MICRO_BATCHES, stages).merge_backwards()
        # With two stages per rank, each has half the layers.
        share = 1 / stages
        cost = StageCost(forward=share, backward_input=share, backward_weight=share)
        result[kind] = draw(schedule.simulate([cost]))
    return result


def page(text: str) -> str:
    """Return the page with new links to the figures between its markers."""
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    content = f"the forwards and backwards of {NUM_RANKS} ranks over time, and the micro-batches in flight"
    lines = "".join(f"`{kind}`\n\n![Schedule {kind}: {content}](pipeline/{kind}.svg)\n\n" for kind in SCHEDULES)
    return f"{text[:begin]}\n{lines}{text[end:]}"


def main() -> int:
    FOLDER.mkdir(exist_ok=True)
    for kind, svg in figures().items():
        (FOLDER / f"{kind}.svg").write_text(svg)
    PAGE.write_text(page(PAGE.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
