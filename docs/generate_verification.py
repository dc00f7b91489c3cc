"""Writes the table of docs/verification.md from a run of each architecture on 2 ranks (about a minute).

    make docs

The text outside the page's two markers is written by hand. tests/strategy/test_architectures.py runs the architectures,
too, and compares all columns of the page's table but the last.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from strategy.architecture_runs import Run, all_runs

from support.architectures import ARCHITECTURES

PAGE = Path(__file__).with_name("verification.md")
BEGIN = "<!-- Written by docs/generate_verification.py (`make docs`) from a run on 2 ranks. -->"
END = "<!-- End of the generated table. -->"
COLUMNS = (
    "architecture",
    "kind",
    "modules and how they are sharded",
    "share of parameter bytes on a rank",
    "largest relative difference",
)


def rows(runs: Iterable[Run]) -> list[tuple[str, ...]]:
    """Return the cells of each run; all but the last are the same on every machine."""
    kinds = {architecture.name: architecture.kind for architecture in ARCHITECTURES}
    return [(run.name, kinds[run.name], _sharded(run), f"{100 * run.share:.0f} %", _difference(run)) for run in runs]


def _sharded(run: Run) -> str:
    return run.sharded.removeprefix("sharded: ").removesuffix(".") if run.result == "equal" else run.result


def _difference(run: Run) -> str:
    return f"{run.difference:.0e}" if run.result == "equal" else "-"


def table(cells: Iterable[tuple[str, ...]]) -> str:
    """Return the generated part of the page."""
    lines = [COLUMNS, ("---",) * len(COLUMNS), *cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def written_rows(text: str) -> list[tuple[str, ...]]:
    """Return the cells of each row of the page's table."""
    _, generated = text.split(BEGIN)
    generated, _ = generated.split(END)
    lines = [line for line in generated.splitlines() if line.startswith("|")]
    return [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines[2:]]


def page(text: str, runs: Iterable[Run]) -> str:
    """Return the page with a new table between its markers."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{table(rows(runs))}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(), all_runs()))
