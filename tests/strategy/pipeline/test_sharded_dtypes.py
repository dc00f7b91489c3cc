"""Stages that FSDP2 shards compute in the dtypes of its policy: recordings agree, and results equal those of layers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from support.ranks import on_ranks
from weft.strategy import Pipeline

BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
BATCH = torch.randn(4, 8, generator=torch.Generator().manual_seed(5))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, *, bias: Tensor | None = None) -> Tensor:
        y = x + self.linear(x)
        return y if bias is None else y + bias


class Layers(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, **options: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, **options) if isinstance(layer, Residual) else layer(x)
        return x


def _residuals(*others: nn.Module) -> Layers:
    torch.manual_seed(0)
    return Layers(*(Residual() for _ in range(4 - len(others))), *others)


def _hooked() -> Layers:
    model = _residuals()
    model.layers[1].register_forward_pre_hook(_add_ones)
    return model


def _add_ones(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (args[0] + torch.ones(8),)  # a float32 result for a bfloat16 input


def _frozen() -> Layers:
    model = _residuals()
    model.layers[0].requires_grad_(False)
    return model


def _normed() -> Layers:
    torch.manual_seed(0)
    return Layers(Residual(), nn.LayerNorm(8), nn.ReLU(), Residual())


CASES: dict[str, tuple[Callable[[], Layers], MixedPrecisionPolicy, bool, dict[str, Tensor]]] = {
    "residuals": (_residuals, BFLOAT16, False, {}),
    "autocast": (_residuals, BFLOAT16, True, {}),
    "inputs are not cast": (
        _residuals,
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False),
        True,
        {},
    ),
    "output dtype": (
        _residuals,
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32),
        False,
        {},
    ),
    "keyword": (_residuals, BFLOAT16, False, {"bias": torch.ones(8)}),
    "hook": (_hooked, BFLOAT16, True, {}),
    "frozen": (_frozen, BFLOAT16, False, {}),
    "norm and no parameters": (_normed, BFLOAT16, True, {}),
}


@on_ranks(1, 2)
@pytest.mark.parametrize("name", CASES)
def test_stages_equal_sharded_layers(rank: int, world_size: int, name: str) -> None:
    if not hasattr(FSDPModule, "finalize_backward"):
        pytest.skip("this torch's FSDP2 has no finalize_backward")
    build, policy, has_autocast, options = CASES[name]
    mesh = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("pipeline_parallel", "data_parallel"))
    model = build()
    expected = copy.deepcopy(model)
    for layer in expected.layers:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh["data_parallel"], mp_policy=policy)
    cuts, schedule = (["layers.2"], "1f1b") if world_size == 2 else (["layers.2"], "interleaved")
    pipeline = Pipeline(model, mesh, cuts, schedule=schedule, num_micro_batches=2, verify="never")
    pipeline.fully_shard(mesh["data_parallel"], mp_policy=policy)

    def loss_of(module: nn.Module, batch: Tensor) -> Tensor:
        return module(batch, **options).float().square().mean()

    with torch.autocast("cpu", torch.bfloat16, enabled=has_autocast):
        with torch.no_grad():
            wanted_values = [loss_of(expected, part) for part in BATCH.chunk(2)]
        values = pipeline.evaluate(BATCH, lambda batch: loss_of(model, batch))
        losses = [loss_of(expected, part) / 2 for part in BATCH.chunk(2)]
        for loss in losses:
            loss.backward()
        loss = pipeline.step(BATCH, lambda batch: loss_of(model, batch))
    if values:  # the last stage has them
        torch.testing.assert_close(torch.stack(values), torch.stack(wanted_values))
    torch.testing.assert_close(loss, sum(losses).double(), rtol=1e-6, atol=0.0)
    wanted = {key: parameter.grad for key, parameter in expected.named_parameters()}
    for key, parameter in model.named_parameters():
        if not parameter.requires_grad:
            assert wanted[key] is None
            continue
        torch.testing.assert_close(parameter.grad.full_tensor(), wanted[key].full_tensor(), rtol=2e-2, atol=1e-3)


class SharedWithTrunk(Layers):
    def __init__(self) -> None:
        super().__init__(*(Residual() for _ in range(4)))
        self.weight = self.layers[0].linear.weight

    def forward(self, x: Tensor, **options: Tensor) -> Tensor:
        return super().forward(x) @ self.weight.t()


def _shared_layers() -> Layers:
    model = _residuals()
    model.layers[1].linear.weight = model.layers[0].linear.weight
    return model


@on_ranks(2)
def test_shared_parameters_raise(rank: int, world_size: int) -> None:
    """On all ranks, also on those that have no such layer; tied weights of different ranks are sharded."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pipeline_parallel", "data_parallel"))
    reasons = {
        _shared_layers: r"the layers 'layers.0' and 'layers.1' of one rank share a parameter, .*; move the cuts",
        SharedWithTrunk: r"the parameter 'weight' is also one of the layer 'layers.0', .*; use it inside of the layer",
    }
    for build, reason in reasons.items():
        pipeline = Pipeline(build(), mesh, ["layers.2"], num_micro_batches=2, verify="never")
        with pytest.raises(ValueError, match=reason):
            pipeline.fully_shard(mesh["data_parallel"])
