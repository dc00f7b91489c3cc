"""The table of docs/benchmarks/memory.md that has the figures of `memory_gate.py --cuda`, from its golden file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memory_report import gigabytes

PAGE = Path(__file__).resolve().parents[1] / "docs/benchmarks/memory.md"
BEGIN = "<!-- Written by benchmarks/memory_gate.py --cuda --page. -->"
END = "<!-- End of the generated table. -->"
LABELS = {
    "stock": "stock",
    "weft": "weft",
    "weft_in_backward": "weft with `optimizer_in_backward`",
    "weft_by_rows": 'weft with `optimizer_in_backward="rows"`',
    "weft_recompute": "weft, MLPs save only their input",
    "weft_checkpointed": "weft with full checkpoints",
}


def row_name(workload: str, column: str, num_ranks: int) -> str:
    """Return the name of a row in the golden file."""
    return f"{workload} at real size, {column}, {num_ranks} ranks"


def table(golden: dict[str, Any], columns: dict[str, tuple[str, ...]], ranks: tuple[int, ...]) -> str:
    """Return allocated and, in parentheses, reserved GB in training, for each workload and column."""

    def cell(row: dict[str, int]) -> str:
        return f"{gigabytes(row['training allocated'])} ({gigabytes(row['training reserved'])})"

    source = f"torch {golden['torch']}, {golden['changes'][-1]['date']}:"
    header = ["workload", "strategy", *(f"{n} rank{'s' if n > 1 else ''}" for n in ranks)]
    lines = [source, "", _line(header), f"{'|---' * len(header)}|"]
    for workload, names in columns.items():
        for column in names:
            rows = [golden["rows"][row_name(workload, column, n)] for n in ranks]
            lines.append(_line([f"`{workload}`", LABELS[column], *map(cell, rows)]))
    return "\n".join(lines)


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def with_table(page: str, table: str) -> str:
    """Return the page's text with another table between the marks."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{after}"
