"""Random cases of the optimizer steps, in every formula and format, shared by their tests."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

import weft
from ops.optimizer_oracle import LARGEST, Case, State, block_maxima, companded, matrix_shape

WEIGHTS = ("float32", "bfloat16", "int16", "int8")  # the last two: bfloat16 with low_bits
STATES = ("float32", "bfloat16", "codes")
FORMULAE = {
    "adamw": {"decoupled_weight_decay": True, "maximize": False, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.99},
    "adam": {"decoupled_weight_decay": False, "maximize": True, "weight_decay": 0.1, "beta1": 0.3, "beta2": 0.9},
    "adam_plain": {"decoupled_weight_decay": False, "maximize": False, "weight_decay": 0.0, "beta1": 0.0, "beta2": 0.5},
    "sgd": {"momentum": 0.9, "dampening": 0.2, "weight_decay": 0.1, "nesterov": False, "maximize": True},
    "nesterov": {"momentum": 0.8, "dampening": 0.0, "weight_decay": 0.0, "nesterov": True, "maximize": False},
}
FLOAT32 = 2.0**-24  # the largest relative error of a rounding
SEED = -0x123456789ABCDEF


def make_case(
    formula: str, shape: tuple[int, ...], weights: str = "float32", states: str = "float32", **options
) -> Case:
    """Return a first step with random tensors; its gradient has the parameter's dtype."""
    is_adam = formula.startswith("adam")
    parameter, low_bits = torch.randn(shape), None
    if weights in ("int16", "int8"):
        parameter, low_bits = weft.ops.split_float(parameter, getattr(torch, weights))
    parameter = parameter.to(torch.float32 if weights == "float32" else torch.bfloat16)
    grad = torch.randn(shape).to(parameter.dtype)
    given = {"step": 1, "lr": 0.01, "seed": SEED, "row": 0, "column": 0, "full_columns": matrix_shape(shape)[1]}
    given |= {"eps": 1e-8} if is_adam else {}
    kinds = (True, False) if is_adam else (True,)
    made = [State.zeros(shape, states, signed) for signed in kinds]
    return Case(parameter, low_bits, grad, made, given | FORMULAE[formula] | options)


def steps(case: Case, count: int) -> Iterator[tuple[Case, Case]]:
    """Make steps with new gradients; yield the case before and after each."""
    for step in range(1, count + 1):
        case.options["step"] = step
        case.grad = torch.randn(case.grad.shape).to(case.grad.dtype)
        before = case.clone()
        case.run()
        yield before, case


def bits_of(case: Case) -> list[Tensor]:
    """Return the tensors that a step changes, floating-point ones as integers."""
    integers = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
    return [tensor.view(integers.get(tensor.dtype, tensor.dtype)) for tensor in case.tensors()]


def assert_same_bits(actual: list[Tensor], expected: list[Tensor]) -> None:
    assert len(actual) == len(expected)
    for left, right in zip(actual, expected, strict=True):
        assert left.dtype == right.dtype and torch.equal(left, right)


def _rounded(magnitude: Tensor, state: State, largest: Tensor | None, random: Tensor) -> Tensor:
    """Return the magnitudes of codes or of bfloat16 bits that numbers of these magnitudes are rounded to."""
    if largest is None:
        return (magnitude.float().view(torch.int32).long() + random) >> 16
    codes = (companded(magnitude, largest, state.values.dtype) + random / 2**16).floor()
    if state.values.dtype == torch.uint8:
        codes = torch.where(magnitude > 0, codes.clamp(min=1), codes)
    return codes.clamp(max=LARGEST[state.values.dtype]).long()


def check_state(before: Case, after: Case, index: int, exact: Tensor) -> None:
    """Check that a new state is the exact one, rounded by the random number that the definition states."""
    state = after.states[index]
    # A bound of the errors of float32, in units of 8 * FLOAT32; terms of different signs may cancel.
    decay = 0.0 if before.options.get("decoupled_weight_decay") else before.options["weight_decay"]
    terms = before.grad.double().abs() + decay * before.full_parameter().abs()
    kept = before.options["beta1" if before.is_adam else "momentum"] * before.states[0].double().abs()
    error = exact.abs() + (exact.sqrt() * terms if index else kept + terms)
    error = 8 * FLOAT32 * error
    if state.values.dtype == torch.float32:
        assert ((state.values.double() - exact).abs() <= error).all()
        return
    largest = None
    if state.scale is not None:
        largest = block_maxima(exact)
        assert ((state.scale.double() - largest).abs() <= block_maxima(error)).all()
        actual = state.values.long().abs()
    else:
        actual = state.values.view(torch.int16).long() & 0x7FFF
    least, most = (
        _rounded(magnitude, state, largest, before.random(index))
        for magnitude in ((exact.abs() - error).clamp(min=0), exact.abs() + error)
    )
    assert ((least <= actual) & (actual <= most)).all()
    assert (least != most).sum() <= 0.02 * actual.numel() + 3  # rounding errors decide for few elements
    assert ((state.values.double() * exact >= 0) | (exact.abs() <= error)).all()
