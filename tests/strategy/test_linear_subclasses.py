"""Subclasses of nn.Linear with a forward of their own: sharded like nn.Linear if they compute the same."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft
import weft.strategy
from support.parity import tensor_parallel
from support.ranks import on_ranks
from weft.strategy.recognition.linears import why_no_linear
from weft.strategy.sharding.local_tensor import local_of


class Product(nn.Linear):
    """Computes its output as Falcon's layers do."""

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight.T
        return y if self.bias is None else y + self.bias


class Scaled(nn.Linear):
    def __init__(self, *sizes: int, scale: float) -> None:
        super().__init__(*sizes)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.scale, self.bias)


class InTraining(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + float(self.training)


class Detached(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, None if self.bias is None else self.bias.detach())


class Noisy(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 1e-6 * torch.randn_like(x))


class Viewed(nn.Linear):
    """Its forward depends on the size of the weight, and weft tries the forward with a small weight."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.view(-1, self.in_features)).view(*x.shape[:-1], self.out_features)


class WithTensor(nn.Linear):
    """Has an attribute that is a tensor, whose values may change."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.tensor = torch.ones(sizes[1])

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


@pytest.mark.parametrize("layer", [Product(8, 6), Product(8, 6, bias=False), Scaled(8, 6, scale=1.0)])
def test_equivalent_forwards_are_accepted(layer: nn.Linear) -> None:
    state = torch.get_rng_state()
    assert why_no_linear(layer) is None
    assert torch.equal(torch.get_rng_state(), state) and torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize(
    "layer",
    [Scaled(8, 6, scale=2.0), InTraining(8, 6), Detached(8, 6), Noisy(8, 6), Viewed(8, 6), WithTensor(8, 6)],
    ids=lambda layer: type(layer).__name__,
)
def test_different_forwards_have_a_reason(layer: nn.Linear) -> None:
    reason = f"{type(layer).__name__} has a forward of its own, which computes something else than nn.Linear"
    assert why_no_linear(layer) == reason


def test_changed_attribute_is_detected() -> None:
    layer = Scaled(8, 6, scale=1.0)
    assert why_no_linear(layer) is None
    layer.scale = 2.0
    assert why_no_linear(layer) is not None


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enlarge, self.reduce = Product(8, 14), Product(14, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.reduce(F.relu(self.enlarge(x)))


@on_ranks(2, 3)
@pytest.mark.parametrize("plan", ["auto", {"enlarge": "column", "reduce": "row"}], ids=["auto", "rules"])
def test_sharded_equals_unsharded(world_size: int, plan: object) -> None:
    torch.manual_seed(0)
    reference = Mlp().double()
    model = weft.parallelize(copy.deepcopy(reference), tensor_parallel(world_size), plan)
    styles = {row.parameter: row.style for row in weft.strategy.report(model).rows}
    is_auto_uneven = plan == "auto" and world_size == 3
    expected = ("column_gather_output", "row_split_input") if is_auto_uneven else ("column", "row")
    assert (styles["enlarge.weight"], styles["reduce.weight"]) == expected
    assert all(local_of(layer.weight).numel() < layer.weight.numel() for layer in (model.enlarge, model.reduce))
    x = torch.randn(3, 8, dtype=torch.float64)
    outputs = [each(x) for each in (model, reference)]
    for output in outputs:
        output.square().sum().backward()
    torch.testing.assert_close(*outputs, rtol=1e-12, atol=1e-12)
    for name, parameter in reference.named_parameters():
        gradient = model.get_parameter(name).grad.full_tensor()
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-11, atol=1e-12)
    if world_size == 2:
        torch.testing.assert_close(weft.export_local(model)(x), outputs[1], rtol=1e-12, atol=1e-12)
