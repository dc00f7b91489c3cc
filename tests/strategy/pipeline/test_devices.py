"""Stages on several devices of one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.models import Llama, LlamaArgs
from weft.strategy.pipeline import spread_over_devices

ARGS = LlamaArgs(n_layers=3, tie_head=True, dtype=torch.float64)


class Skipping(nn.Module):
    """Has a value that skips a stage, a value changed in place, a parameter of the trunk and a scalar buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.full((4,), 1.5))
        self.register_buffer("factor", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        b = self.b(a * self.scale)
        b += a
        return self.c(torch.relu(b) + a * self.factor)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad.cpu() for name, parameter in model.named_parameters()}


def assert_same_training(devices: list[str]) -> None:
    torch.manual_seed(0)
    for make, cuts, x in (
        (lambda: Llama(ARGS), ["layers.1", "layers.2"], torch.randint(37, (2, 5))),
        (lambda: Skipping().double(), ["b", "c"], torch.randn(3, 4, dtype=torch.float64)),
    ):
        reference = make()
        model = spread_over_devices(copy.deepcopy(reference), cuts, devices)
        expected = reference(x)
        output = model(x)
        torch.testing.assert_close(output.cpu(), expected)
        F.mse_loss(output, torch.zeros_like(output)).backward()
        F.mse_loss(expected, torch.zeros_like(expected)).backward()
        torch.testing.assert_close(gradients(model), gradients(reference))
        assert set(model.state_dict()) == set(reference.state_dict())


def test_stages_on_one_device_match_full_model() -> None:
    assert_same_training(["cpu"] * 3)


@pytest.mark.cuda
def test_stages_on_cpu_and_cuda_match_full_model() -> None:
    assert_same_training(["cpu", "cuda", "cuda"])
    assert_same_training(["cuda", "cpu", "cuda"])


def device_types(model: nn.Module) -> dict[str, str]:
    return {name: parameter.device.type for name, parameter in model.named_parameters(remove_duplicate=False)}


def test_layers_and_boundary_values_are_on_their_devices() -> None:
    """The meta device serves as a second device, although it has no values."""
    model = spread_over_devices(Skipping(), ["b", "c"], ["cpu", "meta", "meta"])
    assert device_types(model) == {
        "a.weight": "cpu",
        "a.bias": "cpu",
        "b.weight": "meta",
        "b.bias": "meta",
        "c.weight": "meta",
        "c.bias": "meta",
        "scale": "cpu",
    }
    output = model(torch.randn(3, 4))
    assert output.device.type == "meta" and output.shape == (3, 2)
    model = spread_over_devices(Skipping(), ["b"], ["meta", "cpu"])
    # Values also move from the meta device to the CPU: torch's error shows that the model tried to copy them.
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor; no data"):
        model(torch.randn(3, 4))


def test_tied_layers_are_on_the_first_device() -> None:
    model = spread_over_devices(Llama(ARGS), ["layers.1"], ["cpu", "meta"])
    devices = device_types(model)
    assert model.output.weight is model.tok_embeddings.weight
    assert devices["output.weight"] == devices["layers.0.attention.wq.weight"] == "cpu"
    assert devices["layers.1.attention.wq.weight"] == devices["norm.weight"] == "meta"


@pytest.mark.parametrize(
    ("cuts", "devices", "message"),
    [
        (["b"], ["cpu"], "1 cuts make 2 stages, and there are 1 devices; pass one for each stage"),
        (["d"], ["cpu", "cpu"], "stage 1 is to begin at 'd', which is not a module of the model"),
    ],
)
def test_invalid_cuts_and_devices_raise(cuts: list[str], devices: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spread_over_devices(Skipping(), cuts, devices)


def test_spreading_twice_raises() -> None:
    model: Any = spread_over_devices(Skipping(), ["b"], ["cpu", "cpu"])
    with pytest.raises(ValueError, match="this Skipping is in stages already; build the model anew"):
        spread_over_devices(model, ["b"], ["cpu", "cpu"])
