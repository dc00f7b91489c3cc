"""Writes the tables of docs/operators.md: schemas from torch's registry, the rest from docs/operator_table.py.

    make docs

The text outside the page's two markers is not generated. tests/ops/test_operators_page.py compares the page with this
generator's output, and the figures with measurements.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch

import weft  # noqa: F401  (registers the operators)

sys.path.insert(0, str(Path(__file__).parent))
from operator_table import OPERATORS, Form, Operator, Size

PAGE = Path(__file__).with_name("operators.md")
BEGIN = "<!-- Written by docs/generate_operators.py (`make docs`) from docs/operator_table.py. -->"
END = "<!-- End of the generated tables. -->"
DISPLAY_NAMES = {  # of collectives and messages, by their names in c10d
    "all_reduce": "all-reduce",
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
    "all_to_all_single": "all-to-all",
    "recv": "receive",
}


def public_operators() -> set[str]:
    """Return the names of the registered operators that do not begin with an underscore."""
    names = {schema.name for schema in torch._C._jit_get_all_schemas()}
    names = {name.removeprefix("weft::") for name in names if name.startswith("weft::")}
    return {name for name in names if not name.startswith("_")}


def _math(expression: str) -> str:
    text = re.sub(
        r"2\*\*(\d+)", lambda power: "2" + power[1].translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")), expression
    )
    return text.replace("*", "·")


def _size(size: Size) -> str:
    parts = [] if size.elements == "0" else [_math(size.elements)]
    parts += [] if size.num_bytes == "0" else [f"{_math(size.num_bytes)} bytes"]
    return " and ".join(parts)


def _counts(counts: dict[str, str]) -> str:
    words = (
        f"{_math(count)} {DISPLAY_NAMES.get(name, name)}{'' if count == '1' else 's'}" for name, count in counts.items()
    )
    return ", ".join(words) or "0"


def _shapes(form: Form) -> str:
    inputs = ", ".join(f"{name} `[{_math(shape)}]`" for name, shape in form.tensors.items())
    results = ", ".join(f"`[{_math(shape.strip())}]`" for shape in form.result.split(";"))
    return f"{inputs} -> {results}"


def _kept(form: Form) -> str:
    created = _size(form.saved)
    return ", ".join([*form.keeps, *([f"+ {created}"] if created else [])]) or "nothing"


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _facts(operator: Operator) -> str:
    schema = str(getattr(torch.ops.weft, operator.name).default._schema).removeprefix("weft::")
    schema = re.sub(r"(?<==)[\d.]+e-\d+", lambda number: repr(float(number[0])), schema)  # torch gives 17 digits
    return _row(f"`{schema}`", operator.computes)


def _costs(operator: Operator, form: Form) -> str:
    name = f"`{operator.name}`" + (f", {form.label}" if form.label else "")
    sent = f"{_counts(form.forward)} + {_counts(form.backward)}"
    peaks = _size(form.forward_peak) or "0", _size(form.backward_peak) or "0"
    return _row(name, _shapes(form), _kept(form), sent, *peaks)


def tables() -> str:
    """Return the two tables: what each operator computes, and the memory and communication of each way to call it."""
    lines = [_row("operator", "computes"), "|---|---|", *map(_facts, OPERATORS), ""]
    titles = "call", "shapes on a rank", "kept for the backward", "collectives or messages, forward + backward"
    lines += [_row(*titles, "peak of the forward", "peak of the backward"), "|---|---|---|---|---|---|"]
    lines += [_costs(operator, form) for operator in OPERATORS for form in operator.forms]
    return "\n".join(lines)


def page(text: str) -> str:
    """Return the page with new tables between its markers."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
