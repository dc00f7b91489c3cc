"""The tables of docs/combinations.md: the outcome of each combination, written and read."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from combinations.options import LAYOUTS, Combination, combinations, option_names
from combinations.runs import Outcome

PAGE = Path(__file__).resolve().parents[2] / "docs/combinations.md"
BEGIN = "<!-- Written by docs/generate_combinations.py from runs of all combinations. -->"
END = "<!-- End of the generated tables. -->"
EQUAL, CONTRADICTION = "=", "-"


def cell(outcome: Outcome, reasons: list[str]) -> str:
    """Return the text of an outcome: "=", or the number of the reason in `reasons`, to which a new one is appended."""
    if not outcome.error:
        return EQUAL
    reason = reason_of(outcome.error)
    if reason not in reasons:
        reasons.append(reason)
    return str(reasons.index(reason) + 1)


def reason_of(error: str) -> str:
    """Return an error's first sentence, the same for all runs of a combination."""
    return error.replace("|", "/")


def tables(outcomes: Iterable[Outcome]) -> str:
    """Return the generated part of the page."""
    by_combination = {outcome.combination: outcome for outcome in outcomes}
    reasons: list[str] = []
    parts = []
    for layout in LAYOUTS:
        names = option_names(layout)
        lines = [["option", "alone", *(_short(idx) for idx in range(1, len(names)))], ["---"] * (len(names) + 1)]
        for idx, name in enumerate(names):
            pairs = [(name,), *((other, name) for other in names[:idx])]
            found = [by_combination.get(Combination(layout, pair)) for pair in pairs]
            cells = [CONTRADICTION if each is None else cell(each, reasons) for each in found]
            lines.append([f"{_short(idx + 1)} `{name}`", *cells, *[""] * (len(names) - 1 - idx)])
        rows = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        parts.append(f"### `{layout}`\n\n{rows}")
    numbered = "\n".join(f"{idx + 1}. {reason}" for idx, reason in enumerate(reasons))
    return "\n\n".join([*parts, f"### Errors\n\n{numbered}"])


def _short(number: int) -> str:
    return chr(ord("a") + number - 1)


def page(text: str, outcomes: Iterable[Outcome]) -> str:
    """Return the page with new tables between its markers."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{tables(outcomes)}\n\n{END}{after}"


def written(text: str, layouts: Iterable[str] = LAYOUTS) -> dict[Combination, str]:
    """Return, for each combination of the page on these layouts, "" if it works, or the reason of its error.

    Raises:
        ValueError: the page lacks a combination, or has one that does not exist.
    """
    _, rest = text.split(BEGIN)
    generated, _ = rest.split(END)
    sections, _, errors = generated.partition("### Errors")
    reasons = [match[1] for match in re.finditer(r"^\d+\. (.+)$", errors, re.MULTILINE)]
    found: dict[Combination, str] = {}
    for section in sections.split("### `")[1:]:
        layout, _, body = section.partition("`")
        lines = [line.strip().strip("|").split("|") for line in body.splitlines() if line.startswith("|")][2:]
        names = [line[0].strip().split(" ", 1)[1].strip("`") for line in lines]
        for idx, line in enumerate(lines):
            pairs = [(names[idx],), *((other, names[idx]) for other in names[:idx])]
            for pair, text_of_cell in zip(pairs, line[1:], strict=False):
                value = text_of_cell.strip()
                if value != CONTRADICTION:
                    found[Combination(layout, pair)] = "" if value == EQUAL else reasons[int(value) - 1]
    layouts = tuple(layouts)
    found = {combination: reason for combination, reason in found.items() if combination.layout in layouts}
    wanted = {combination for layout in layouts for combination in combinations(layout)}
    if found.keys() != wanted:
        raise ValueError(f"docs/combinations.md lacks {wanted - found.keys()}, and has {found.keys() - wanted}")
    return found
