"""The optimizer steps and conversions of formats on CUDA tensors have the results of the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import weft
from ops.optimizer_cases import STATES, WEIGHTS, check_state, make_case, steps
from ops.optimizer_oracle import Case, State

pytestmark = pytest.mark.cuda


def _on(case: Case, device: str) -> Case:
    def moved(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(device)

    states = [State(state.values.to(device), moved(state.scale)) for state in case.states]
    return Case(case.parameter.to(device), moved(case.low_bits), case.grad.to(device), states, dict(case.options))


@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("formula", ["adamw", "nesterov"])
def test_steps_are_those_of_the_cpu(formula: str, weights: str, states: str) -> None:
    torch.manual_seed(0)
    for shape in [(3, 600), (1000,), (2, 3, 7), (0, 4)]:
        case = make_case(formula, shape, weights, states)
        list(steps(case, 2))  # on the CPU
        case.options["step"] = 3
        on_cuda = _on(case, "cuda")
        on_cuda.run()
        after = _on(on_cuda, "cpu")
        parameter, exact_states = case.exact()
        for index, exact in enumerate(exact_states):
            check_state(case, after, index, exact)
        rtol = 2.0**-8 if weights == "bfloat16" else 2.0**-15 if weights == "int8" else 1e-6
        torch.testing.assert_close(after.full_parameter(), parameter, rtol=rtol, atol=1e-6)


def test_conversions_are_those_of_the_cpu() -> None:
    torch.manual_seed(1)
    x = torch.randn(3, 700) * torch.randn(3, 700).exp()
    for dtype in (torch.int16, torch.int8):
        split = weft.ops.split_float(x, dtype)
        on_cuda = weft.ops.split_float(x.cuda(), dtype)
        assert all(torch.equal(left, right.cpu()) for left, right in zip(split, on_cuda, strict=True))
        assert torch.equal(weft.ops.join_float(*on_cuda).cpu(), weft.ops.join_float(*split))
    for signed in (True, False):
        codes, scale = weft.ops.quantize_blocks(x if signed else x.abs(), signed)
        on_cuda = weft.ops.quantize_blocks((x if signed else x.abs()).cuda(), signed)
        assert torch.equal(on_cuda[1].cpu(), scale)
        difference = (on_cuda[0].cpu().int() - codes.int()).abs()
        assert difference.max() <= 1 and difference.count_nonzero() <= 3  # rounding errors at ties
        decoded = weft.ops.dequantize_blocks(codes.cuda(), scale.cuda()).cpu()
        torch.testing.assert_close(decoded, weft.ops.dequantize_blocks(codes, scale), rtol=1e-6, atol=0)


def test_tensors_of_different_devices_raise() -> None:
    case = make_case("adamw", (4,))
    case.grad = case.grad.cuda()
    with pytest.raises(ValueError, match="weft::adam_step_: got grad on cuda:0 with parameter on cpu; move them"):
        case.run()
