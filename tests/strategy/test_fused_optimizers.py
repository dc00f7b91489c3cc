"""torch's fused optimizers: the same losses and less memory, also after loading a state or adding a group."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from ops.memory.counting import counted
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
from torch.optim import SGD, Adagrad, Adam, AdamW

import weft
from support.ranks import on_ranks
from weft.strategy import fuse

OPTIMIZERS: dict[str, Any] = {
    "adam": lambda p: Adam(p, lr=1e-2, weight_decay=0.1, amsgrad=True),
    "adamw": lambda p: AdamW(p, lr=1e-2),
    "sgd": lambda p: SGD(p, lr=0.05),
    "momentum": lambda p: SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adagrad": lambda p: Adagrad(p, lr=0.05, lr_decay=0.01),
}


def _model(seed: int = 3) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5, bias=False))


def _losses(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> list[float]:
    data = torch.randn(num_steps, 11, 7, generator=torch.Generator().manual_seed(5))
    losses = []
    for x in data:
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@on_ranks(1, 3)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fused_losses_match_unfused(rank: int, world_size: int, name: str) -> None:
    """Some weights have uneven shards."""
    expected_model = _model()
    expected = _losses(expected_model, OPTIMIZERS[name](expected_model.parameters()), 20)
    model = _model()
    mesh = torch.distributed.init_device_mesh("cpu", (world_size,))
    weft.parallelize(model, mesh, {"0": "column", "2": "row"})
    optimizer = OPTIMIZERS[name](model.parameters())
    assert fuse(optimizer, model) is None
    torch.testing.assert_close(_losses(model, optimizer, 20), expected, rtol=1e-5, atol=0)


@on_ranks(4)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_of_several_meshes_match_unfused(name: str) -> None:
    """A group has the shards of two meshes and, of the layer that is not sharded, plain tensors."""
    plain, sharded = (nn.Sequential(_model(), nn.Tanh(), nn.Linear(5, 7), _model(4)) for _ in range(2))
    sharded.load_state_dict(plain.state_dict())
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    for layer, axis in ((0, "outer"), (3, "inner")):
        weft.parallelize(sharded[layer], mesh[axis], {"0": "column", "2": "row"})
    optimizer = OPTIMIZERS[name](sharded.parameters())
    assert fuse(optimizer, sharded) is None
    found, expected = _losses(sharded, optimizer, 5), _losses(plain, OPTIMIZERS[name](plain.parameters()), 5)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


@on_ranks(1)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_loaded_state_keeps_optimizer_fused(rank: int, name: str) -> None:
    plain = _model()
    stock = OPTIMIZERS[name](plain.parameters())
    first = _losses(plain, stock, 3)
    resumed = copy.deepcopy(plain)
    saved = copy.deepcopy(stock.state_dict())
    expected = _losses(plain, stock, 3)

    optimizer = OPTIMIZERS[name](resumed.parameters())
    assert fuse(optimizer) is None
    optimizer.load_state_dict(saved)
    assert [group["fused"] for group in optimizer.param_groups] == [True]
    torch.testing.assert_close(_losses(resumed, optimizer, 3), expected, rtol=1e-5, atol=0)

    # The reverse: a fused optimizer's state loaded into a stock one.
    again = _model()
    other = OPTIMIZERS[name](again.parameters())
    fuse(other)
    torch.testing.assert_close(_losses(again, other, 3), first, rtol=1e-5, atol=0)
    stock_again = OPTIMIZERS[name](again.parameters())
    stock_again.load_state_dict(other.state_dict())
    torch.testing.assert_close(_losses(again, stock_again, 3), expected, rtol=1e-5, atol=0)


@on_ranks(1)
def test_later_groups_are_fused(rank: int) -> None:
    model = _model()
    optimizer = AdamW(model[0].parameters())
    fuse(optimizer, model)
    optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.5})
    assert [group["fused"] for group in optimizer.param_groups] == [True, True]
    _losses(model, optimizer, 1)


class _Subclass(AdamW):
    """A subclass, which may step in any way."""


@on_ranks(2)
def test_unsupported_optimizers_stay_unfused() -> None:
    model = _model()
    cases = [
        (_Subclass(model.parameters()), "_Subclass has no fused variant"),
        (torch.optim.RMSprop(model.parameters()), "RMSprop has no fused variant"),
        (AdamW(model.parameters(), foreach=True), "foreach=True was chosen"),
        (AdamW(model.parameters(), fused=False), "fused=False was chosen"),
        (SGD(model.parameters(), differentiable=True), "it is differentiable"),
        (Adam([torch.zeros(2, dtype=torch.complex64)]), "it steps torch.complex64 parameters"),
        (Adam([torch.zeros(2, device="meta")]), "there is no fused kernel on meta"),
    ]
    embedding = nn.ModuleDict({"words": nn.Embedding(5, 3, sparse=True)})
    for optimizer, reason in cases:
        flags = [group.get("fused") for group in optimizer.param_groups]
        assert fuse(optimizer) == reason
        assert [group.get("fused") for group in optimizer.param_groups] == flags
    assert fuse(SGD(embedding.parameters(), lr=0.1), embedding) == "the gradient of 'words' is sparse"
    assert fuse(AdamW(model.parameters(), fused=True)) is None


@on_ranks(1)
@pytest.mark.parametrize("name", ["adam", "adamw", "momentum", "adagrad"])
def test_step_with_existing_states_allocates_nothing(rank: int, name: str) -> None:
    with counted():
        model = nn.Linear(64, 256, bias=False)
        optimizer = OPTIMIZERS[name](model.parameters())
        fuse(optimizer)
        for _ in range(2):
            model.weight.grad = torch.ones_like(model.weight)
            optimizer.step()
        weft.memory.reset_peak()
        before = weft.memory.current()
        optimizer.step()
        assert weft.memory.peak() - before <= 64  # scalars, such as a step count


@on_ranks(2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_partial_gradients_are_summed(world_size: int, name: str) -> None:
    """SequenceParallel leaves the gradient of a norm's weight partial; optimizers that are not fused sum it."""
    mesh = init_device_mesh("cpu", (world_size,))
    x = torch.linspace(-1, 1, 2 * 4 * 6).view(2, 4, 6)
    weights = []
    for fused in (False, True):
        norm = parallelize_module(nn.LayerNorm(6), mesh, SequenceParallel())
        optimizer = OPTIMIZERS[name](norm.parameters())
        if fused:
            assert fuse(optimizer, norm) is None
        for scale in (1.0, 2.0):
            optimizer.zero_grad()
            norm(x.chunk(2, 1)[torch.distributed.get_rank()] * scale).to_local().square().sum().backward()
            assert norm.weight.grad.placements[0].is_partial()
            if fused and name == "momentum":  # torch creates the momentum with the gradient's placements
                with pytest.raises(RuntimeError, match="give them the same ones, or pass fused=False"):
                    optimizer.step()
                return
            optimizer.step()
        weights.append(norm.weight.full_tensor().detach())
    torch.testing.assert_close(*weights, rtol=1e-6, atol=1e-7)
