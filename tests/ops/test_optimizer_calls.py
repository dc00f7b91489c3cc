"""Registration, versions and errors of adam_step_ and momentum_step_."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ops.optimizer_cases import assert_same_bits, bits_of, make_case
from ops.optimizer_oracle import Case, State

OPCHECKED = [
    ("adamw", "float32", "float32"),
    ("adam", "int16", "codes"),
    ("sgd", "bfloat16", "bfloat16"),
    ("nesterov", "int8", "codes"),
]


@pytest.mark.parametrize(("formula", "weights", "states"), OPCHECKED)
def test_opcheck(formula: str, weights: str, states: str) -> None:
    case = make_case(formula, (3, 300), weights, states)
    op = torch.ops.weft.adam_step_ if case.is_adam else torch.ops.weft.momentum_step_
    results = torch.library.opcheck(op.default, tuple(case.arguments()), case.options)
    assert set(results.values()) == {"SUCCESS"} and len(results) == 4


def test_compiled_step_has_the_bits_of_the_eager_one() -> None:
    torch.manual_seed(8)
    eager = make_case("adamw", (3, 300), "int16", "codes")
    compiled = eager.clone()

    def step(*arguments: Tensor | None) -> None:
        torch.ops.weft.adam_step_(*arguments, **compiled.options)

    eager.run()
    torch.compile(step, backend="aot_eager", fullgraph=True)(*compiled.arguments())
    assert_same_bits(bits_of(compiled), bits_of(eager))


def test_step_changes_versions_and_raises_for_leaves_that_require_a_gradient() -> None:
    case = make_case("adamw", (4,))
    versions = [tensor._version for tensor in case.tensors()]
    case.run()
    assert [tensor._version for tensor in case.tensors()] == [version + 1 for version in versions]
    assert case.grad._version == 0
    case.parameter.requires_grad_()
    with pytest.raises(ValueError, match="weft::adam_step_: got a tensor that requires a gradient, which"):
        case.run()
    with torch.no_grad():
        case.run()


def _changed(formula: str, changes: dict[str, object], weights: str = "bfloat16", states: str = "codes") -> Case:
    case = make_case(formula, (3, 300), weights, states)
    for name, value in changes.items():
        if name in case.options:
            case.options[name] = value
        elif name.startswith("state"):
            index, attribute = name.removeprefix("state").split("_")
            setattr(case.states[int(index)], attribute, value)
        else:
            setattr(case, name, value)
    return case


INT8, INT16, BF16 = torch.int8, torch.int16, torch.bfloat16
INVALID = [
    (
        "adamw",
        {"parameter": torch.zeros(3, 300, dtype=torch.float64)},
        TypeError,
        "got parameter of dtype Double; pass f",
    ),
    (
        "adamw",
        {"grad": torch.zeros(3, 300, dtype=torch.float16)},
        TypeError,
        "got grad of dtype Half; pass float32",
    ),
    (
        "adamw",
        {"grad": torch.zeros(3, 299)},
        ValueError,
        r"got grad of shape \[3, 299\]; pass \[3, 300\], the shape of",
    ),
    ("adamw", {"grad": torch.zeros(300, 3).t()}, ValueError, r"got grad of strides \[1, 3\]; pass a contiguous tensor"),
    ("adamw", {"grad": torch.zeros(3, 300, device="meta")}, ValueError, "got grad on meta with parameter on cpu; move"),
    (
        "adamw",
        {"low_bits": torch.zeros(3, 300, dtype=torch.int32)},
        TypeError,
        "got low_bits of dtype Int with a param",
    ),
    (
        "adamw",
        {"low_bits": torch.zeros(3, 1, dtype=INT8)},
        ValueError,
        r"got low_bits of shape \[3, 1\]; pass \[3, 300\]",
    ),
    (
        "adamw",
        {"state0_values": torch.zeros(3, 300, dtype=torch.uint8)},
        TypeError,
        "got exp_avg of dtype Byte",
    ),
    (
        "adamw",
        {"state1_values": torch.zeros(3, 300, dtype=INT8)},
        TypeError,
        "got exp_avg_sq of dtype Char; pass",
    ),
    (
        "adamw",
        {"state0_scale": None},
        ValueError,
        "got exp_avg of dtype Char without exp_avg_scale; pass exp_avg",
    ),
    (
        "adamw",
        {"state1_scale": torch.zeros(3, 1)},
        ValueError,
        r"got exp_avg_sq_scale of shape \[3, 1\]; pass \[3, 2\]",
    ),
    (
        "adamw",
        {"state1_scale": torch.zeros(3, 2).double()},
        TypeError,
        "got exp_avg_sq_scale of dtype Double; pass float",
    ),
    (
        "adamw",
        {"state1_values": torch.zeros(3, 300), "state1_scale": None},
        TypeError,
        "got exp_avg of dtype Char with exp_avg_sq of dtype Float; pass both in float32, both in bfloat16, or",
    ),
    (
        "sgd",
        {"state0_values": torch.zeros(3, 300, dtype=BF16)},
        ValueError,
        "got momentum_buffer of dtype BFloat16 w",
    ),
    ("adamw", {"step": 0}, ValueError, "got step 0; pass the number of the step being made, from 1"),
    ("adamw", {"row": -1}, ValueError, "got row -1, column 0 and full_columns 300 with 300 columns; pass the place"),
    ("sgd", {"column": 1}, ValueError, "got row 0, column 1 and full_columns 300 with 300 columns; pass the place"),
    ("adamw", {"lr": -1.0}, ValueError, "got lr -1; pass a finite number that is not negative"),
    ("adamw", {"beta1": 1.0}, ValueError, "got beta1 1; pass a number from 0 to 1, without 1"),
    ("adamw", {"beta2": float("nan")}, ValueError, "got beta2 nan; pass a number from 0 to 1"),
    ("adamw", {"eps": float("inf")}, ValueError, "got eps inf; pass a finite number"),
    ("sgd", {"weight_decay": -0.1}, ValueError, "got weight_decay -0.1; pass a finite number"),
    (
        "sgd",
        {"momentum": 0.0},
        ValueError,
        "got momentum 0; pass a finite number above 0, because SGD without momentum",
    ),
    ("sgd", {"dampening": float("nan")}, ValueError, "got dampening nan; pass a finite number"),
    ("nesterov", {"dampening": 0.1}, ValueError, "got nesterov with dampening 0.1; pass dampening 0 with nesterov"),
]


@pytest.mark.parametrize(("formula", "changes", "error", "message"), INVALID)
def test_invalid_arguments_raise_before_anything_changes(
    formula: str, changes: dict[str, object], error: type[Exception], message: str
) -> None:
    case = _changed(formula, changes)
    before = [tensor.clone() for tensor in case.tensors()]
    name = "adam_step_" if case.is_adam else "momentum_step_"
    with pytest.raises(error, match=f"weft::{name}: {message}"):
        case.run()
    for tensor, old in zip(case.tensors(), before, strict=True):
        assert torch.equal(tensor, old)
    on_meta = _changed(formula, changes)
    if message.endswith("move"):
        return
    for attribute in ("parameter", "grad", "low_bits"):
        tensor = getattr(on_meta, attribute)
        setattr(on_meta, attribute, None if tensor is None else tensor.to("meta"))
    on_meta.states = [
        State(state.values.to("meta"), None if state.scale is None else state.scale.to("meta"))
        for state in on_meta.states
    ]
    with pytest.raises(error, match=f"weft::{name}: {message}"):
        on_meta.run()
