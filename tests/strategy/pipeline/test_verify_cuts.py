"""Cuts that change a model's results: tensors that reach later layers other than by arguments and outputs."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from support.models import Llama, LlamaArgs
from support.ranks import on_ranks
from weft.strategy.pipeline import Pipeline
from weft.strategy.pipeline.stages import find_layers
from weft.strategy.pipeline.verify_cuts import verify_cuts
from weft.strategy.verification.rehearsal import rehearse

DIM = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class StoresGate(Block):
    """Each block stores a gate for the next one in a dict that all blocks share."""

    def __init__(self, shared: dict[str, Tensor]) -> None:
        super().__init__()
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        gate = self.shared["gate"] if "gate" in self.shared else torch.ones(())
        self.shared["gate"] = x.mean().sigmoid()
        return super().forward(x * gate)


class ChangesInput(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(0.5))


class Residual(nn.Module):
    """The input of the blocks is used again after them."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(blocks)
        self.last = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        hidden = x
        for block in self.blocks:
            hidden = block(hidden)
        return self.last(x + hidden)


def _shared_gates() -> nn.Module:
    shared: dict[str, Tensor] = {}
    return Residual(StoresGate(shared), StoresGate(shared), StoresGate(shared))


CASES = {
    "shared gates": (_shared_gates, "on stage 1 the input of 'blocks.1.up' differs"),
    "in place": (lambda: Residual(ChangesInput(), Block()), "on stage 1 the input of 'last' differs"),
}
REMEDY = "have layers take all tensors as arguments and return them"


@pytest.mark.parametrize("case", CASES)
def test_stages_that_change_results_raise(case: str) -> None:
    make, difference = CASES[case]
    model = make()
    state = torch.random.get_rng_state()
    with pytest.raises(ValueError, match=f"{re.escape(difference)}; {REMEDY}"):
        verify_cuts(model, find_layers(model, ["blocks.1"]), rehearse(model))
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("cuts", [["blocks.1"], ["blocks.0", "blocks.1", "last"]])
def test_equal_stages_pass(cuts: list[str]) -> None:
    model = Residual(Block(), Block())
    verify_cuts(model, find_layers(model, cuts), rehearse(model))
    llama = Llama(LlamaArgs())
    verify_cuts(llama, find_layers(llama, ["layers.1", "output"]), rehearse(llama))


@on_ranks(2)
def test_pipelines_verify_their_cuts(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pipeline_parallel",))
    model = _shared_gates()
    with pytest.raises(ValueError, match="on stage 1 the input of"):
        Pipeline(model, mesh, ["blocks.1"])
    Pipeline(model, mesh, ["blocks.1"], verify="never")
