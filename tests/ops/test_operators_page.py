"""docs/operators.md equals its generator's output, lists every operator, and its figures are measured."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import math
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import weft
from ops.figures import Figures, measure, measure_message
from support.ranks import on_ranks, run_on_ranks

DOCS = Path(__file__).resolve().parents[2] / "docs"
# The first has at least as many tokens as a weight has rows or columns. The ratio of any two sizes differs
# between the two, so that a wrong expression fails for one of them.
SHAPES = ({"T": 48, "d": 24, "f": 28, "o": 36, "v": 44}, {"T": 42, "d": 18, "f": 12, "o": 4, "v": 92})
STATED_SIZES = ("saved", "forward_peak", "backward_peak")
SLACK = 64  # bytes, for a few scalars
FLOAT_BYTES = 4


def _load(name: str) -> ModuleType:
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


TABLE = _load("operator_table")
ROWS = {row.name: row for row in TABLE.OPERATORS}
FORMS = {
    f"{name}-{index}": (name, form)
    for name, row in ROWS.items()
    if name not in TABLE.MESSAGE_SIDES
    for index, form in enumerate(row.forms)
}


def test_page_is_up_to_date() -> None:
    generator = _load("generate_operators")
    text = generator.PAGE.read_text()
    assert generator.page(text) == text, "run `make docs`"


def test_every_public_operator_has_a_row() -> None:
    registered = _load("generate_operators").public_operators()
    assert "column_linear" in registered
    assert set(ROWS) == registered, "write its row in docs/operator_table.py"


def _value(expression: str, symbols: dict[str, int]) -> int:
    return int(eval(expression, {"__builtins__": {}, "max": max, "min": min, "ceil": math.ceil}, symbols))


def _shape(text: str, symbols: dict[str, int]) -> list[int]:
    return [_value(each, symbols) for each in text.split(",") if each]


def _routes(symbols: dict[str, int]) -> dict[str, Tensor]:
    """Return the integers of a mixture of experts, in which all experts are chosen equally often."""
    tokens, ranks = symbols["T"], symbols["n"]
    ids = torch.arange(2 * tokens) % (2 * ranks)
    return {
        "counts": torch.full((2,), tokens // 2),
        "expert_ids": ids.view(tokens, 2),
        "order": ids.argsort(stable=True),
        "sent": torch.full((ranks,), 2 * tokens // ranks),
        "received": torch.full((ranks, 2), tokens // ranks),
    }


def _make(operator: str, form: object, symbols: dict[str, int]) -> dict[str, object]:
    tensors: dict[str, Tensor] = {}
    for name, shape in form.tensors.items():
        if name in TABLE.INTEGERS:
            tensors[name] = torch.randint(0, symbols["n"] * symbols["v"], _shape(shape, symbols))
        elif name in TABLE.ROUTES:
            tensors[name] = _routes(symbols)[name]
        else:
            tensors[name] = torch.randn(_shape(shape, symbols), requires_grad=True)
    computed = {name: _value(expression, symbols) for name, expression in form.computed.items()}
    takes_group = "group_name" in inspect.signature(getattr(weft.ops, operator)).parameters
    group = {"group_name": dist.group.WORLD.group_name} if takes_group else {}
    return {**tensors, **form.options, **computed, **group}


def _check(name: str, form: object, rank: int, world_size: int) -> None:
    for sizes in SHAPES:
        symbols = {**sizes, "n": world_size, "rank": rank}
        figures = measure(getattr(weft.ops, name), partial(_make, name, form, symbols))
        assert figures.forward == {key: _value(count, symbols) for key, count in form.forward.items()}
        assert figures.backward == {key: _value(count, symbols) for key, count in form.backward.items()}
        sizes_measured = torch.tensor([getattr(figures, field) for field in STATED_SIZES])
        dist.all_reduce(sizes_measured, dist.ReduceOp.MAX)  # the table states the maximum over the ranks
        _check_sizes(form, figures, sizes_measured.tolist(), symbols)


def _check_sizes(
    form: object, figures: Figures, sizes_measured: list[int], symbols: dict[str, int], slack: int = SLACK
) -> None:
    symbols |= {key: torch.Size(_shape(shape, symbols)).numel() for key, shape in form.tensors.items()}
    symbols["y"] = figures.results[0].numel()
    assert [list(result.shape) for result in figures.results] == [
        _shape(each, symbols) for each in form.result.split(";")
    ]
    assert figures.keeps == set(form.keeps)
    for field, measured in zip(STATED_SIZES, sizes_measured, strict=True):
        stated = getattr(form, field)
        expected = FLOAT_BYTES * _value(stated.elements, symbols) + _value(stated.num_bytes, symbols)
        assert abs(measured - expected) <= slack, f"{field}: {measured} bytes, not {expected}, with {symbols}"


@on_ranks(2, 3)
@pytest.mark.parametrize("key", FORMS)
def test_figures_match_measurements(rank: int, world_size: int, key: str) -> None:
    _check(*FORMS[key], rank, world_size)


@on_ranks(2)
@pytest.mark.parametrize("index", range(2))
def test_message_figures_match_measurements(rank: int, index: int) -> None:
    form = ROWS[TABLE.MESSAGE_SIDES[rank]].forms[index]
    for symbols in SHAPES:
        x = torch.randn(symbols["T"], symbols["d"], requires_grad=bool(form.backward))
        figures, messages = measure_message(x, rank, dist.group.WORLD.group_name)
        stated = Counter({name: int(count) for name, count in form.forward.items()})
        assert messages == stated + Counter({name: int(count) for name, count in form.backward.items()})
        _check_sizes(form, figures, [getattr(figures, field) for field in STATED_SIZES], dict(symbols), slack=0)


def undetected_wrong_figures(rank: int, world_size: int) -> list[str]:
    """Return the names of the wrong figures of one form that the check does not notice."""
    name, form = FORMS["all_gather_linear-0"]
    larger = TABLE.Size("y + n*x + 32")
    changes = {"forward": {}, "backward": form.forward, "keeps": ("x",), "saved": larger}
    changes |= {"forward_peak": larger, "backward_peak": larger, "result": "T, f"}
    undetected = []
    for field, value in changes.items():
        try:
            _check(name, dataclasses.replace(form, **{field: value}), rank, world_size)
        except AssertionError:
            continue
        undetected.append(field)
    return undetected


def test_wrong_figures_are_detected() -> None:
    assert run_on_ranks(2, undetected_wrong_figures) == [[], []]
