"""Writes the table of docs/drop_in_features.md from the features that tests/lightning_plugin/drop_in runs.

    make docs

The text outside the page's two markers is written by hand. The test runs each feature of the table on each layout, and
compares the page with what this file would write.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from lightning_plugin.drop_in.features import FEATURES, REASONS
from lightning_plugin.drop_in.models import LAYOUTS

PAGE = Path(__file__).with_name("drop_in_features.md")
BEGIN = "<!-- Written by docs/generate_drop_in.py (`make docs`) from the features that the tests run. -->"
END = "<!-- End of the generated table. -->"


def table() -> str:
    """Return the generated part of the page: the outcome of each feature on each layout, then the reasons."""
    texts = list(dict.fromkeys(text for feature in FEATURES for text in feature.refused.values()))
    lines = [("feature", *(f"`{layout}`" for layout in LAYOUTS)), ("---",) * (len(LAYOUTS) + 1)]
    for feature in FEATURES:
        cells = []
        for layout in LAYOUTS:
            text = feature.refused.get(layout)
            supported = "yes" if layout in feature.layouts else "-"
            cells.append(supported if text is None else f"no ({texts.index(text) + 1})")
        lines.append((feature.name, *cells))
    rows = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    reasons = "\n".join(f"{number}. {REASONS[text]}" for number, text in enumerate(texts, 1))
    return f"{rows}\n\n{reasons}"


def page(text: str) -> str:
    """Return the page with a new table between its markers."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
