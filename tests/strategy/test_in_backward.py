"""The optimizer's step inside the backward: the same weights, one gradient at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ops.memory.counting import counted
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.optim import SGD, Adam, AdamW
from torch.utils.checkpoint import checkpoint

import weft
from support.ranks import on_ranks
from weft.strategy import StepInBackward, checkpoint_activations, fuse
from weft.strategy.data_parallel.clipping import GradientNorm

WIDTH = 24
OPTIMIZERS: dict[str, Any] = {
    "adam": lambda p: Adam(p, lr=1e-2, amsgrad=True),
    "adamw": lambda p: AdamW(p, lr=1e-2),
    "momentum": lambda p: SGD(p, lr=0.05, momentum=0.9),
    "sgd": lambda p: SGD(p, lr=0.05),
}


class Model(nn.Module):
    """An embedding tied to the head around two feed-forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(31, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 37), nn.ReLU(), nn.Linear(37, WIDTH)) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 31, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def _model() -> Model:
    torch.manual_seed(7)
    return Model().double()


def _batches(num_steps: int) -> Tensor:
    return torch.randint(31, (num_steps, 5, 9), generator=torch.Generator().manual_seed(8))


def _loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, schedule: bool = False) -> list[float]:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) if schedule else None
    losses = []
    for tokens in _batches(6):
        loss = _loss(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses


def _full(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


@on_ranks(1)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_is_bitwise_equal_on_one_rank(rank: int, name: str, fused: bool) -> None:
    def run(in_backward: bool) -> tuple[list[float], dict[str, Tensor], dict[str, Any]]:
        model = _model()
        optimizer = OPTIMIZERS[name]([{"params": list(model.words.parameters()), "lr": 0.02}, {"params": rest(model)}])
        if fused:
            fuse(optimizer)
        stepper = StepInBackward(model, optimizer) if in_backward else None
        losses = _train(model, optimizer, schedule=True)
        if stepper is not None:
            assert stepper.num_stepped == 0
            assert all(parameter.grad is None for parameter in model.parameters())
            stepper.remove()
        return losses, dict(model.named_parameters()), optimizer.state_dict()

    def rest(model: Model) -> list[nn.Parameter]:
        return [parameter for parameter in model.parameters() if parameter is not model.words.weight]

    losses, weights, state = run(in_backward=False)
    got_losses, got_weights, got_state = run(in_backward=True)
    assert got_losses == losses
    for key, value in weights.items():
        assert torch.equal(got_weights[key], value), key
    assert got_state["param_groups"] == state["param_groups"]
    torch.testing.assert_close(got_state["state"], state["state"], rtol=0, atol=0)


@on_ranks(4)
@pytest.mark.parametrize("layout", ["tensor", "fsdp", "both"])
def test_sharded_training_matches_one_device(rank: int, world_size: int, layout: str) -> None:
    sizes = {"tensor": (1, 4), "fsdp": (4, 1), "both": (2, 2)}[layout]
    mesh = torch.distributed.init_device_mesh("cpu", sizes, mesh_dim_names=("data_parallel", "tensor_parallel"))
    for name in ("adamw", "momentum"):
        expected_model = _model()
        expected = _train(expected_model, OPTIMIZERS[name](expected_model.parameters()))
        model = _model()
        weft.parallelize(model, mesh, {"blocks.*.0": "column", "blocks.*.2": "row"})
        if layout != "tensor":
            for block in model.blocks:
                fully_shard(block, mesh=mesh["data_parallel"])
            fully_shard(model, mesh=mesh["data_parallel"])
        optimizer = OPTIMIZERS[name](model.parameters())
        assert fuse(optimizer) is None
        stepper = StepInBackward(model, optimizer)
        losses = _train(model, optimizer)
        torch.testing.assert_close(losses, expected, rtol=1e-10, atol=0)
        for (key, got), value in zip(model.named_parameters(), expected_model.parameters(), strict=True):
            torch.testing.assert_close(_full(got), value, rtol=1e-9, atol=1e-12, msg=lambda m, k=key: f"{k}: {m}")
        stepper.remove()


@on_ranks(4)
@pytest.mark.parametrize("layout", ["tensor", "fsdp", "both"])
def test_clipping_by_norm_matches_one_device(rank: int, world_size: int, layout: str) -> None:
    """Some steps are clipped, some are not; every third accumulates the batches before it."""
    sizes = {"tensor": (1, 4), "fsdp": (4, 1), "both": (2, 2)}[layout]
    mesh = torch.distributed.init_device_mesh("cpu", sizes, mesh_dim_names=("data_parallel", "tensor_parallel"))
    expected_model, model = _model(), _model()
    weft.parallelize(model, mesh, {"blocks.*.0": "column", "blocks.*.2": "row"})
    if layout != "tensor":
        for block in model.blocks:
            fully_shard(block, mesh=mesh["data_parallel"])
        fully_shard(model, mesh=mesh["data_parallel"])
    theirs, ours = SGD(expected_model.parameters(), lr=0.5), SGD(model.parameters(), lr=0.5)
    stepper = StepInBackward(model, ours)
    limits = [0.01, 100, 0.02, 0.5, 0.01, 100]
    for idx, (tokens, limit) in enumerate(zip(_batches(6), limits, strict=True)):
        accumulates = idx == 3
        _loss(expected_model, tokens).backward()
        if accumulates:
            with stepper.accumulating():
                assert stepper.backward(_loss(model, tokens), limit) is None
            assert stepper.num_stepped == 0
            continue
        expected = nn.utils.clip_grad_norm_(expected_model.parameters(), limit)
        norm = stepper.backward(_loss(model, tokens), limit)
        torch.testing.assert_close(norm, expected, rtol=1e-10, atol=0)
        assert all(parameter.grad is None for parameter in model.parameters())
        assert stepper.num_stepped == len(list(model.parameters()))
        for optimizer in (theirs, ours):
            optimizer.step()
            optimizer.zero_grad()
    for (key, got), value in zip(model.named_parameters(), expected_model.parameters(), strict=True):
        torch.testing.assert_close(_full(got), value, rtol=1e-9, atol=1e-12, msg=lambda m, k=key: f"{k}: {m}")
    stepper.remove()


@on_ranks(4)
def test_norm_does_not_depend_on_the_order_of_gradients(rank: int, world_size: int) -> None:
    """Each rank adds the gradients in another order."""
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2))
    placements = [(Shard(0), Replicate()), (Replicate(), Shard(0)), (Shard(0), Shard(1)), (Replicate(), Replicate())]
    full = [torch.full((4, 4), 10.0**idx, dtype=torch.float64) for idx in range(4)]
    gradients = [distribute_tensor(value, mesh, places) for value, places in zip(full, placements, strict=True)]
    norm = GradientNorm(2.0, gradients)
    for idx in range(4):
        norm.add([gradients[(idx + rank) % 4]])
    expected = torch.linalg.vector_norm(torch.cat(full))
    torch.testing.assert_close(norm.total(), expected, rtol=1e-12, atol=0)


@on_ranks(1)
def test_gradients_are_stepped_in_the_order_of_the_optimizer(rank: int) -> None:
    """Averaging a gradient communicates, so the order is the same on all replicas."""
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(20)))
    optimizer = SGD(model.parameters(), lr=0.1)
    seen: list[Tensor] = []
    stepper = StepInBackward(model, optimizer, seen.append)
    with stepper.accumulating():
        model(torch.randn(2, 3)).sum().backward()
    assert seen == []
    chosen = list(model.parameters())[5:35]
    stepper.step_gradients(set(chosen))
    assert [id(parameter) for parameter in seen] == [id(parameter) for parameter in chosen]
    assert stepper.num_stepped == 30 and all(parameter.grad is None for parameter in chosen)


@on_ranks(1)
def test_clipping_by_norm_rejects_selective_checkpoints(rank: int) -> None:
    model = _model()
    checkpoint_activations(model, "selective")
    stepper = StepInBackward(model, SGD(model.parameters(), lr=0.1))
    before = model.words.weight.clone()
    with pytest.raises(RuntimeError, match="runs the backward twice, and selective checkpoints support one"):
        stepper.backward(_loss(model, _batches(1)[0]), 1.0)
    assert torch.equal(model.words.weight, before)


@on_ranks(1, 2)
def test_one_gradient_is_alive_at_a_time(rank: int, world_size: int) -> None:
    """The peak is the parameters and two moments of three equal weights, and the gradient of one."""

    class FeedForward(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w1, self.w3 = (nn.Linear(512, 1024, bias=False) for _ in range(2))
            self.w2 = nn.Linear(1024, 512, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))

    weight = 512 * 1024 * 4 // world_size
    mesh = torch.distributed.init_device_mesh("cpu", (world_size,))
    with counted() as count:
        model = weft.parallelize(FeedForward(), mesh, "auto")
        optimizer = AdamW(model.parameters())
        fuse(optimizer)
        stepper = StepInBackward(model, optimizer)
        x = torch.randn(2, 512)
        for step in range(3):
            weft.memory.reset_peak()
            if step < 2:
                model(x).sum().backward()
            else:
                stepper.backward(model(x).sum(), max_norm=1.0)
            if step:
                assert 10 * weight <= count.peak() <= 10.3 * weight
            optimizer.step()
        stepper.remove()


@on_ranks(1)
def test_unsupported_training_raises(rank: int) -> None:
    model = _model()
    with pytest.raises(ValueError, match="the optimizer is of class RMSprop, and only Adam, AdamW, SGD are known"):
        StepInBackward(model, torch.optim.RMSprop(model.parameters()))
    with pytest.raises(ValueError, match="the optimizer is differentiable"):
        StepInBackward(model, SGD(model.parameters(), lr=0.1, differentiable=True))

    optimizer = SGD(model.parameters(), lr=0.1)
    stepper = StepInBackward(model, optimizer)
    [first, second] = _batches(2)
    _loss(model, first).backward()
    assert stepper.num_stepped == len(list(model.parameters()))
    with pytest.raises(
        RuntimeError, match=r"got a gradient from a second backward after 9 parameters had already been updated"
    ):
        _loss(model, second).backward()
    optimizer.step()
    optimizer.zero_grad()
    _loss(model, second).backward()

    optimizer.step()
    x = torch.randn(3, WIDTH, dtype=torch.float64, requires_grad=True)
    inner = checkpoint(model.blocks[0], x, use_reentrant=True)
    with pytest.raises(RuntimeError, match="use checkpoints with use_reentrant=False"):
        (model.blocks[1](inner)).sum().backward()
    stepper.remove()


def test_optimizer_of_another_model_raises() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    with pytest.raises(ValueError, match="2 parameters of the optimizer are not of the model"):
        StepInBackward(model, torch.optim.SGD(other.parameters(), lr=0.1))
    assert not getattr(other.weight, "_post_accumulate_grad_hooks", None)
