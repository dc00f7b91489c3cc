"""Random numbers of stages: equal before the layers, and independent inside the layers of each stage."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from support.ranks import on_ranks
from weft.strategy.pipeline import Pipeline


class Layer(nn.Module):
    """Draws a random mask, as dropout does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.drawn: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.rand(x.shape)
        if not isinstance(x, torch._subclasses.FakeTensor):
            self.drawn.append(mask)
        return x * self.weight * mask


class Noisy(nn.Module):
    """Adds noise before its first layer, and subtracts it after its last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(4)])
        self.noises: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn(x.shape)
        self.noises.append(noise)
        y = x + noise
        for layer in self.layers:
            y = layer(y)
        return y - noise


def seed() -> None:
    torch.manual_seed(5)
    random.seed(5)
    numpy.random.seed(5)


@on_ranks(2)
@pytest.mark.parametrize("kind", ["1f1b", "interleaved", "zbv"])
def test_stages_draw_equal_numbers_per_micro_batch(rank: int, world_size: int, kind: str) -> None:
    cuts = ["layers.1", "layers.2", "layers.3"] if kind != "1f1b" else ["layers.2"]
    model = Noisy()
    layers, seen = list(model.layers), {}
    pipeline = Pipeline(model, init_device_mesh("cpu", (world_size,)), cuts, schedule=kind, num_micro_batches=3)

    def loss_of(micro_batch: Tensor) -> Tensor:
        before = torch.cat([torch.randn(3), torch.tensor([random.random(), numpy.random.rand()])])
        if not pipeline.is_recording:
            seen.setdefault(int(micro_batch[0, 0]), []).append(before)
        return (model(micro_batch) - before[0]).square().mean()

    batch = torch.arange(3.0).view(3, 1).expand(3, 2).contiguous()
    pipeline.step(batch, loss_of)  # this step also records the forward; its draws are discarded below
    seed()
    for records in (seen, *[{"": layer.drawn} for layer in layers], {"": model.noises}):
        [each.clear() for each in records.values()]
    pipeline.step(batch, loss_of)
    after = torch.tensor([torch.rand(()), random.random(), numpy.random.rand()])

    drawn = [[mask.tolist() for mask in layer.drawn] for layer in layers]
    noises = sorted({tuple(noise.flatten().tolist()) for noise in model.noises})
    steps = {i: sorted({tuple(each.tolist()) for each in found}) for i, found in seen.items()}
    mine: dict[str, Any] = {"drawn": drawn, "noises": noises, "steps": steps, "after": after.tolist()}
    found: list[Any] = [None, None]
    dist.all_gather_object(found, mine)
    for name in ("noises", "steps", "after"):
        assert found[0][name] == found[1][name], name
    # All stages draw the same number for a micro-batch, and micro-batches draw different ones.
    assert [len(each) for each in found[0]["steps"].values()] == [1, 1, 1] and len(noises) == 3
    assert len({each for [each] in found[0]["steps"].values()}) == 3
    masks = [str(mask) for each in found for of_layer in each["drawn"] for mask in of_layer]
    assert len(masks) == len(set(masks)) == 4 * 3

    seed()
    [layer.drawn.clear() for layer in layers]
    pipeline.step(batch, loss_of)
    assert [[mask.tolist() for mask in layer.drawn] for layer in layers] == drawn
    pipeline.step(batch, loss_of)
    assert all(str(layer.drawn[0]) != str(layer.drawn[3]) for layer in layers if layer.drawn)
