"""The Python bindings of the values of `weft.strategy._plan`; tests/cpp/strategy tests the rules of these values."""

from __future__ import annotations

import ast
import copy
import inspect
import itertools
import json
import pathlib
import pickle
from typing import TypeAlias

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from weft.strategy import _plan
from weft.strategy._plan import AXIS_NAMES, STYLES, Mesh, Plan, Rule

Fields: TypeAlias = "list[tuple[str, str, str | None, bool]]"

STYLES_WITH_HEADS = ("column", "row")

# Printable text, without the characters YAML folds or drops: any other name survives every text form.
LEVELS = st.text(
    st.characters(codec="utf-8", exclude_categories=("C", "Zl", "Zp"), exclude_characters="."),
    min_size=1,
    max_size=8,
).filter(lambda level: "**" not in level)
PATTERNS = st.lists(LEVELS, max_size=4).map(".".join)
HEADS = st.sampled_from(["n_heads", "n", "on", "null", "_1", "köpfe"])


@st.composite
def rules(draw: st.DrawFn) -> Fields:
    patterns = draw(st.lists(PATTERNS, max_size=6, unique=True))
    styles = [draw(st.sampled_from(STYLES)) for _ in patterns]
    heads = [draw(st.none() | HEADS) if style in STYLES_WITH_HEADS else None for style in styles]
    recompute = [style == "column_row_mlp" and draw(st.booleans()) for style in styles]
    return list(zip(patterns, styles, heads, recompute, strict=True))


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    names = draw(st.lists(st.sampled_from(AXIS_NAMES), unique=True, max_size=5))
    return Mesh([(name, draw(st.integers(1, 4))) for name in names])


def as_dict(fields: Fields) -> dict[str, object]:
    result: dict[str, object] = {}
    for pattern, style, heads, recompute in fields:
        options = {**({} if heads is None else {"heads": heads}), **({"recompute": True} if recompute else {})}
        result[pattern] = {"style": style, **options} if options else style
    return result


# -- plans -------------------------------------------------------------------------------------------


@given(rules())
def test_plan_round_trips_through_text_yaml_json_and_pickle(fields: Fields) -> None:
    plan = Plan([Rule(*each) for each in fields])
    assert [(rule.pattern, rule.style, rule.heads, rule.recompute) for rule in plan.rules] == fields
    assert len(plan) == len(fields)
    copies = [Plan.parse(str(plan)), Plan(plan.rules), pickle.loads(pickle.dumps(plan)), copy.deepcopy(plan)]
    for other in copies:
        assert other == plan
        assert hash(other) == hash(plan)
    for mapping in (yaml.safe_load(str(plan)), json.loads(plan.to_json())):
        assert mapping == as_dict(fields)
        assert list(mapping) == [pattern for pattern, *_ in fields]
    assert eval(repr(plan), {"Plan": Plan, "Rule": Rule}) == plan


def test_json_is_compact() -> None:
    plan = Plan([("layers.*.wq", "column", "n_heads"), ("", "replicate", None)])
    assert plan.to_json() == '{"layers.*.wq":{"style":"column","heads":"n_heads"},"":"replicate"}'


def test_resolve_keeps_module_order_and_accepts_unicode() -> None:
    plan = Plan([("é.*", "row", None), Rule("", "column", "n_heads")])
    resolved = plan.resolve(["", "é", "é.b", "é.a"])
    assert resolved == [
        ("", Rule("", "column", "n_heads")),
        ("é.b", Rule("é.*", "row")),
        ("é.a", Rule("é.*", "row")),
    ]


def test_resolve_matches_the_names_of_a_torch_module() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Linear(2, 2)))
    names = [name for name, _ in model.named_modules()]
    resolved = Plan([("*", "replicate", None), ("1.*", "column", None)]).resolve(names)
    assert [(name, rule.style) for name, rule in resolved] == [
        ("0", "replicate"), ("1", "replicate"), ("1.0", "column"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (
            lambda: Plan([("wq", "colunm", None)]),
            f"plan: pattern 'wq': unknown style 'colunm': use one of {', '.join(STYLES)}; the nearest is 'column'",
        ),
        (
            lambda: Plan([Rule("wq", "row", recompute=True)]),
            "plan: pattern 'wq': recompute is not supported by style 'row'; remove recompute or use style "
            "'column_row_mlp'",
        ),
        (
            lambda: _plan.check_style("rowwise"),
            f"unknown style 'rowwise': use one of {', '.join(STYLES)}; the nearest is 'row'",
        ),
        (
            lambda: Plan([("wk", "row", None)]).resolve(["", "wq"]),
            "plan: pattern 'wk' matches no module; nearest: 'wq', '' (the model itself); correct the "
            "pattern or remove the rule",
        ),
        (
            lambda: Plan([("w*", "row", None), ("wq", "column", None)]).resolve(["", "wq"]),
            "plan: module 'wq' gets style 'row' from pattern 'w*' and style 'column' from pattern 'wq'; "
            "change the patterns so that the rules agree",
        ),
        (
            lambda: Plan([("a..b", "row", None)]),
            "pattern 'a..b': a level between dots is empty; write a name or '*' there",
        ),
        (
            lambda: Plan.parse("wq row"),
            "plan, line 1: no ':' at column 4 in 'wq row'; write 'pattern: style' or "
            "'pattern: {style: column, heads: n_heads}'",
        ),
        (
            lambda: _plan.check_heads("layers.0.attention.wq", "n_heads", 6, 4),
            "layers.0.attention.wq: n_heads = 6 heads do not divide over 4 tensor-parallel ranks; use a "
            "tensor-parallel size that divides 6 or style 'replicate'",
        ),
        (
            lambda: Mesh([("tensor_parallel", 4)]).check_world_size(2),
            "mesh 'tensor_parallel=4' has 4 ranks, but the job has 2; use sizes whose product is 2, such as "
            "'tensor_parallel=2'",
        ),
    ],
)
def test_errors_are_one_sentence(build, sentence: str) -> None:
    with pytest.raises(ValueError) as caught:
        build()
    assert str(caught.value) == sentence


# -- meshes ------------------------------------------------------------------------------------------


@given(meshes())
def test_mesh_round_trips_and_enumerates_like_a_product(mesh: Mesh) -> None:
    for other in (Mesh.parse(str(mesh)), Mesh(mesh.axes), pickle.loads(pickle.dumps(mesh)), copy.copy(mesh)):
        assert other == mesh
        assert hash(other) == hash(mesh)
    assert eval(repr(mesh), {"Mesh": Mesh}) == mesh
    coordinates = [list(c) for c in itertools.product(*(range(size) for _, size in mesh.axes))]
    assert [mesh.coordinates(rank) for rank in range(mesh.size())] == coordinates
    assert [mesh.rank(c) for c in coordinates] == list(range(mesh.size()))


@given(meshes())
def test_groups_are_the_rows_of_the_rank_tensor(mesh: Mesh) -> None:
    ranks = torch.arange(mesh.size()).reshape([size for _, size in mesh.axes])
    for dim, (axis, size) in enumerate(mesh.axes):
        assert mesh.has_axis(axis)
        assert mesh.size(axis) == size
        assert mesh.groups(axis) == ranks.movedim(dim, -1).reshape(-1, size).tolist()
        assert all(mesh.group(axis, rank) == group for group in mesh.groups(axis) for rank in group)


def test_values_are_immutable_and_differ_from_other_types() -> None:
    mesh, rule, plan = Mesh([("tensor_parallel", 2)]), Rule("a", "row"), Plan([("a", "row", None)])
    for value, attribute in ((mesh, "axes"), (rule, "style"), (rule, "heads"), (plan, "rules")):
        with pytest.raises(AttributeError):
            setattr(value, attribute, "row")
    mesh.axes.append(("data_parallel", 2))
    plan.rules.clear()
    assert str(mesh) == "tensor_parallel=2"
    assert len(plan) == 1
    assert mesh != "tensor_parallel=2"
    assert plan != mesh


# -- shards ------------------------------------------------------------------------------------------


@given(st.integers(0, 200), st.integers(1, 24))
def test_shard_range_is_torch_chunk(dim_size: int, num_ranks: int) -> None:
    chunks = [chunk.tolist() for chunk in torch.arange(dim_size).chunk(num_ranks)] if dim_size else []
    chunks += [[]] * (num_ranks - len(chunks))
    for rank, chunk in enumerate(chunks):
        start, length = _plan.shard_range(dim_size, num_ranks, rank)
        assert list(range(start, start + length)) == chunk
        assert length > 0 or start == dim_size


# -- the stub ----------------------------------------------------------------------------------------


def parameter_names(function: ast.FunctionDef) -> list[str]:
    arguments = [*function.args.args, *function.args.kwonlyargs]
    return [argument.arg for argument in arguments if argument.arg != "self"]


def bound_parameter_names(function: object) -> list[str]:
    """Return the names in the signature that pybind11 writes as the first line of a docstring."""
    signature = (inspect.getdoc(function) or "").splitlines()[0]
    signature = signature.partition(" -> ")[0]
    parsed = ast.parse(f"def {signature}: pass").body[0]
    assert isinstance(parsed, ast.FunctionDef)
    return parameter_names(parsed)


def test_stub_describes_the_module() -> None:
    root = pathlib.Path(__file__).parents[2]
    stub = ast.parse((root / "strategy" / "python" / "_plan.pyi").read_text(encoding="utf-8"))
    described = {}
    for node in stub.body:
        if isinstance(node, ast.AnnAssign):
            described[node.target.id] = node
        elif isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            described[node.name] = node
    assert set(described) == {name for name in dir(_plan) if not name.startswith("_")}

    for name, node in described.items():
        if isinstance(node, ast.FunctionDef):
            assert bound_parameter_names(getattr(_plan, name)) == parameter_names(node), name
        if isinstance(node, ast.ClassDef):
            bound = getattr(_plan, name)
            members = {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}
            attributes = {item.target.id for item in node.body if isinstance(item, ast.AnnAssign)}
            public = {member for member in dir(bound) if not member.startswith("_")}
            assert public == attributes | {member for member in members if not member.startswith("_")}, name
            for attribute in attributes:
                assert getattr(bound, attribute).fset is not None, attribute
            for member, item in members.items():
                if not item.decorator_list and not member.startswith("_"):
                    assert bound_parameter_names(getattr(bound, member)) == parameter_names(item), member
