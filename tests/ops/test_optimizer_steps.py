"""adam_step_ and momentum_step_: torch's optimizers, and a float64 oracle for every format."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ops.optimizer_cases import (
    FLOAT32,
    FORMULAE,
    STATES,
    WEIGHTS,
    assert_same_bits,
    bits_of,
    check_state,
    make_case,
    steps,
)
from ops.optimizer_oracle import BLOCK, Case

SHAPES = [(3, 700), (2, 64), (1000,), (), (2, 3, 100), (5, 1), (0, 4), (4, 0), (0,)]


@pytest.mark.parametrize("formula", FORMULAE)
def test_float32_is_torchs_optimizer(formula: str) -> None:
    torch.manual_seed(0)
    case = make_case(formula, (7, 300), lr=0.01)
    options = case.options
    given = {key: options[key] for key in ("lr", "weight_decay", "maximize")}
    reference = case.parameter.clone().requires_grad_()
    if case.is_adam:
        kind = torch.optim.AdamW if options["decoupled_weight_decay"] else torch.optim.Adam
        given |= {"betas": (options["beta1"], options["beta2"]), "eps": options["eps"]}
    else:
        kind = torch.optim.SGD
        given |= {key: options[key] for key in ("momentum", "dampening", "nesterov")}
    optimizer = kind([reference], **given, foreach=False)
    for _, after in steps(case, 20):
        reference.grad = after.grad.clone()
        optimizer.step()
        # The update is at most about 10 lr; each of the steps adds a few rounding errors of the parameter and of it.
        torch.testing.assert_close(after.parameter, reference.detach(), rtol=40 * FLOAT32, atol=40 * FLOAT32)
    names = ("exp_avg", "exp_avg_sq") if case.is_adam else ("momentum_buffer",)
    for name, state in zip(names, case.states, strict=True):
        torch.testing.assert_close(state.values, optimizer.state[reference][name], rtol=1e-5, atol=1e-6)


def check_parameter(after: Case, exact: Tensor) -> None:
    """Check that the new parameter is the exact one within one rounding of its format."""
    nearest = exact.float().to(torch.bfloat16)
    if after.parameter.dtype == torch.bfloat16:
        assert ((nearest.view(torch.int16) - after.parameter.view(torch.int16)).abs() <= 1).all()
        different = nearest != after.parameter  # ties, or rounding errors near one
        assert different.sum() <= 0.01 * different.numel() + 1
    if after.parameter.dtype == torch.float32 or after.low_bits is not None:
        is_narrow = after.low_bits is not None and after.low_bits.dtype == torch.int8
        rtol = 2.0**-16 if is_narrow else 8 * FLOAT32
        torch.testing.assert_close(after.full_parameter(), exact, rtol=rtol, atol=8 * FLOAT32)


@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("formula", FORMULAE)
def test_every_format_is_the_oracle(formula: str, weights: str, states: str) -> None:
    torch.manual_seed(1)
    for shape in SHAPES:
        case = make_case(formula, shape, weights, states)
        if weights != "float32":
            case.grad = case.grad.float()  # of another dtype in the first step than in the next ones
        for before, after in steps(case, 3):
            parameter, exact_states = before.exact()
            check_parameter(after, parameter)
            for index, exact in enumerate(exact_states):
                check_state(before, after, index, exact)
            case.grad = case.grad.to(case.parameter.dtype)


def test_bfloat16_parameter_is_rounded_to_nearest_even() -> None:
    for low, expected in [(0x7FFF, 0), (0x8000, 0), (0x8001, 1), (0x18000, 2), (0x17FFF, 1)]:
        # A parameter 1 and the update -low * 2^-23, exact in float32: SGD with lr 1 and that gradient.
        case = make_case("nesterov", (1,), "bfloat16", nesterov=False, lr=1.0)
        case.parameter.fill_(1)
        case.grad = torch.tensor([-low * 2.0**-23])
        case.run()
        assert case.parameter.view(torch.int16).item() == 0x3F80 + expected


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("formula", ["adamw", "sgd"])
def test_codes_of_a_block_that_is_not_finite_are_nan(formula: str, value: float) -> None:
    torch.manual_seed(6)
    case = make_case(formula, (2, 2 * BLOCK), "float32", "codes")
    case.grad[0, 3] = value
    case.run()
    for state in case.states:
        assert torch.equal(state.scale.isnan(), torch.tensor([[True, False], [False, False]]))
        assert (state.values[0, :BLOCK] == 0).all()
        assert state.double()[0, :BLOCK].isnan().all() and not state.double()[1].isnan().any()
    others = case.parameter.isfinite()
    assert others[1].all() and others[0, BLOCK:].all() and others[0, :BLOCK].sum() == BLOCK - 1
    case.grad[0, 3] = 0
    case.options["step"] = 2
    case.run()
    assert case.parameter[0, :BLOCK].isnan().all() and case.parameter[1].isfinite().all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_bfloat16_formats_keep_nan_and_infinity(value: float) -> None:
    for weights in ("bfloat16", "int16", "int8"):
        case = make_case("sgd", (70,), weights, "bfloat16", maximize=False)
        case.grad = torch.ones(70)
        case.grad[5] = value
        case.run()
        assert case.states[0].values.isfinite().sum() == 69
        assert torch.equal(case.states[0].values[5].isnan(), torch.tensor(math.isnan(value)))
        assert case.parameter.isfinite().sum() == 69 and case.full_parameter().isfinite().sum() == 69


def test_tiny_and_zero_gradients() -> None:
    """Moments below the normal numbers keep scales and codes that decode to about the same numbers."""
    case = make_case("adamw", (3 * BLOCK,), "float32", "codes", eps=1e-8)
    case.grad[:BLOCK] = 0
    case.grad[BLOCK : 2 * BLOCK] = 1e-21
    case.grad[2 * BLOCK :] *= 1e18
    before = case.clone()
    case.run()
    parameter, states = before.exact()
    torch.testing.assert_close(case.parameter.double(), parameter, rtol=1e-6, atol=1e-6)
    assert [bool(scale) for scale in case.states[1].scale] == [False, True, True]
    assert (case.states[0].values[:BLOCK] == 0).all() and (case.states[1].values[:BLOCK] == 0).all()
    for state, exact in zip(case.states, states, strict=True):
        torch.testing.assert_close(state.double()[BLOCK:], exact[BLOCK:], rtol=0.05, atol=exact.max().item() * 0.05)


def test_empty_tensors_are_left_alone() -> None:
    for shape in [(0,), (0, 5), (5, 0)]:
        for states in STATES:
            case = make_case("adamw", shape, "int16", states)
            case.run()
            assert case.parameter.shape == torch.Size(shape)


def test_threads_do_not_change_the_bits() -> None:
    torch.manual_seed(7)
    first = make_case("adamw", (300, 700), "int8", "codes")
    second = first.clone()
    first.run()
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        second.run()
    finally:
        torch.set_num_threads(threads)
    assert_same_bits(bits_of(first), bits_of(second))
