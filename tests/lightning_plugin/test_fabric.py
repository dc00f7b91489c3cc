"""Fabric with weft: parallelize_fn and plan, parity with one device, checkpoints at other world sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning_plugin.scripts.plugin_models import (
    DIM,
    FeedForward,
    assert_same_weights,
    fixed_data,
    set_torchrun_environment,
    weights,
)
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from support.ranks import on_ranks, run_on_ranks
from weft.lightning.fabric import WeftModelParallelStrategy


class Net(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.norm = nn.LayerNorm(DIM, dtype=torch.float64)
        self.feed_forward = FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        return self.feed_forward(self.norm(x))


def _user_sharding(model: nn.Module, mesh: Any) -> nn.Module:
    plan = {"w1": ColwiseParallel(), "w3": ColwiseParallel(), "w2": RowwiseParallel()}
    parallelize_module(model.feed_forward, mesh["tensor_parallel"], plan)
    return model


def _fabric(world_size: int, strategy: Any) -> Fabric:
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy)
    fabric.launch()
    return fabric


def _optimizer(model: nn.Module, name: str) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.05)
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def _run_steps(fabric: Fabric, model: nn.Module, optimizer: Any, num_steps: int) -> list[float]:
    losses = []
    for batch in fixed_data().split(4)[:num_steps]:
        loss = ((model(batch) - batch) ** 2).mean()
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=0.05)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _train(rank: int, world_size: int, strategy: Any, order: str) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses and weights after training.

    order: "together": the optimizer is set up with the model; "after": it is created and set up after the model was
        set up; "made before": it is created before the model is set up, and set up afterwards.
    """
    set_torchrun_environment(rank, world_size)
    fabric = _fabric(world_size, WeftModelParallelStrategy(plan="auto") if strategy is None else strategy)
    model = Net()
    optimizer = _optimizer(model, "adamw")
    if order == "together":
        model, optimizer = fabric.setup(model, optimizer)
    else:
        model = fabric.setup(model)
        optimizer = fabric.setup_optimizers(optimizer if order == "made before" else _optimizer(model, "adamw"))
    return _run_steps(fabric, model, optimizer, 6), weights(model.module)


def test_matches_one_device() -> None:
    [(losses, expected)] = run_on_ranks(1, _train, strategy="auto", order="together")
    cases = [(1, "weft", "after"), (2, "weft_tp", "after"), (2, None, "after"), (4, "weft", "after")]
    cases += [(2, "weft", "together"), (2, "weft", "made before")]
    for world_size, strategy, order in cases:
        for got_losses, got in run_on_ranks(world_size, _train, strategy=strategy, order=order):
            torch.testing.assert_close(got_losses, losses, rtol=1e-10, atol=0)
            assert_same_weights(got, expected)


@on_ranks(2)
def test_stepped_optimizer_raises(rank: int, world_size: int) -> None:
    set_torchrun_environment(rank, world_size)
    model = Net()
    optimizer = _optimizer(model, "adamw")
    model(fixed_data()).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"AdamW has state of \d parameters that sharding has replaced; set the"):
        _fabric(world_size, "weft").setup(model, optimizer)


@on_ranks(2)
def test_parallelize_fn_works_with_and_without_plan(rank: int, world_size: int) -> None:
    set_torchrun_environment(rank, world_size)
    with_function = _fabric(world_size, WeftModelParallelStrategy(_user_sharding)).setup(Net())
    assert isinstance(with_function.feed_forward.w1.weight, DTensor)
    assert not isinstance(with_function.norm.weight, DTensor)
    with_neither = _fabric(world_size, WeftModelParallelStrategy()).setup(Net())
    assert not isinstance(with_neither.feed_forward.w1.weight, DTensor)
    with pytest.raises(TypeError, match=r"must return a `nn\.Module`"):
        _fabric(world_size, WeftModelParallelStrategy(lambda model, mesh: None, plan="auto")).setup(Net())
    seen = []
    with_both = WeftModelParallelStrategy(lambda model, mesh: seen.append(mesh) or model, plan="auto")
    model = _fabric(world_size, with_both).setup(Net())
    assert seen == [with_both.device_mesh]
    assert isinstance(model.norm.weight, DTensor)


@on_ranks(2)
def test_weights_and_random_streams_equal_on_all_ranks(rank: int, world_size: int) -> None:
    set_torchrun_environment(rank, world_size)
    fabric = _fabric(world_size, "weft")
    model = fabric.setup(Net(seed=rank))
    assert_same_weights(weights(model.module), weights(fabric.setup(Net(seed=0)).module), rtol=0)
    drawn = [torch.empty(1) for _ in range(world_size)]
    torch.distributed.all_gather(drawn, torch.rand(1))
    assert drawn[0] == drawn[1]
    with pytest.raises(ValueError, match="training batch 0 differs between rank 0 and rank 1"):
        model(fixed_data()[:4] + rank)


def _save(rank: int, world_size: int, folder: str, optimizer: str) -> dict[str, Tensor]:
    set_torchrun_environment(rank, world_size)
    for sharded in (True, False):
        fabric = _fabric(world_size, WeftModelParallelStrategy(plan="auto", save_distributed_checkpoint=sharded))
        model = fabric.setup(Net())
        fabric_optimizer = fabric.setup_optimizers(_optimizer(model, optimizer))
        _run_steps(fabric, model, fabric_optimizer, 3)
        fabric.save(Path(folder, f"{sharded}-{world_size}"), {"model": model, "optimizer": fabric_optimizer, "step": 3})
    _run_steps(fabric, model, fabric_optimizer, 6)
    return weights(model.module)


def _load(rank: int, world_size: int, folder: str, optimizer: str, names: list[str]) -> list[dict[str, Tensor]]:
    set_torchrun_environment(rank, world_size)
    results = []
    for name in names:
        fabric = _fabric(world_size, "weft")
        model = fabric.setup(Net(seed=9))
        fabric_optimizer = fabric.setup_optimizers(_optimizer(model, optimizer))
        state = {"model": model, "optimizer": fabric_optimizer, "step": 0}
        fabric.load(Path(folder, name), state)
        assert state["step"] == 3
        _run_steps(fabric, model, fabric_optimizer, 6)
        results.append(weights(model.module))
    return results


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_checkpoints_resume_at_other_world_sizes(tmp_path: Path, optimizer: str) -> None:
    folder = str(tmp_path)
    expected, *_ = [run_on_ranks(size, _save, folder=folder, optimizer=optimizer)[0] for size in (1, 2)]
    names = [f"{sharded}-{size}" for sharded in (True, False) for size in (1, 2)]
    for world_size in (1, 2, 4):
        for results in run_on_ranks(world_size, _load, folder=folder, optimizer=optimizer, names=names):
            for resumed in results:
                assert_same_weights(resumed, expected)
