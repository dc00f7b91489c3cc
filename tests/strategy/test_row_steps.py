"""Fused MLPs that step their own weights by rows: the numbers of the usual step, and no whole gradient of them."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from ops.collectives.profiled import collectives_of
from ops.memory.counting import counted
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW

import weft
from support.models import Conv1D, FeedForward
from support.ranks import on_ranks
from weft.strategy import StepInBackward, fuse

DIM, HIDDEN = 12, 37  # the parts of 37 differ between ranks
OPTIMIZERS: dict[str, Any] = {
    "adam": lambda p: Adam(p, lr=1e-2, amsgrad=True),
    "adamw": lambda p: AdamW(p, lr=1e-2),
    "momentum": lambda p: SGD(p, lr=0.05, momentum=0.9, dampening=0.3),
    "sgd": lambda p: SGD(p, lr=0.05),
}
FUSED = {"blocks.*.mlp": "column_row_mlp"}


class Mlp(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        if kind == "transposed":
            self.c_fc, self.c_proj = Conv1D(HIDDEN, DIM), Conv1D(DIM, HIDDEN)
        else:
            has_bias = kind != "gated"
            self.up_proj, self.down_proj = nn.Linear(DIM, HIDDEN, has_bias), nn.Linear(HIDDEN, DIM, has_bias)
            if kind == "gated":
                self.gate_proj = nn.Linear(DIM, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "c_fc"):
            return self.c_proj(nn.functional.gelu(self.c_fc(x)))
        if hasattr(self, "gate_proj"):
            return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return self.down_proj(nn.functional.gelu(self.up_proj(x)))


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(DIM), Mlp(kind)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    """An embedding, which is not of an MLP, and blocks of which `order` says which run."""

    def __init__(self, kind: str = "gated", order: tuple[int, ...] = (0, 1)) -> None:
        super().__init__()
        self.words = nn.Embedding(31, DIM)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(2))
        self.order = order

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for index in self.order:
            x = self.blocks[index](x)
        return x


def _by_rows(model: nn.Module, optimizer: torch.optim.Optimizer, block_bytes: int = 5 * DIM * 8) -> StepInBackward:
    """Five rows of most weights at a time."""
    stepper = StepInBackward(model, optimizer, by_rows=True)
    stepper._rows.block_bytes = block_bytes
    return stepper


def _model(mesh: Any = None, plan: Any = None, **options: Any) -> Model:
    torch.manual_seed(7)
    model = Model(**options).double()
    return model if mesh is None else weft.parallelize(model, mesh, plan or FUSED)


def _loss(model: nn.Module, step: int) -> Tensor:
    tokens = torch.randint(31, (5, 9), generator=torch.Generator().manual_seed(step))
    return (model(tokens) - 1).square().mean()


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int = 4) -> list[float]:
    losses = []
    for step in range(num_steps):
        loss = _loss(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _whole(value: Any) -> Any:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _assert_same(model: nn.Module, optimizer: Any, expected: nn.Module, expected_optimizer: Any) -> None:
    for (name, got), value in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(_whole(got), value, rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")
    states, expected_states = optimizer.state_dict(), expected_optimizer.state_dict()
    assert states["param_groups"] == expected_states["param_groups"]
    assert states["state"].keys() == expected_states["state"].keys()
    for index, state in expected_states["state"].items():
        assert states["state"][index].keys() == state.keys()
        for name, value in state.items():
            got = _whole(states["state"][index][name])
            torch.testing.assert_close(got, value, rtol=1e-9, atol=1e-12, check_dtype=False)


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("kind", ["gated", "plain", "transposed"])
def test_gives_the_numbers_of_the_usual_step(rank: int, world_size: int, kind: str) -> None:
    mesh = torch.distributed.init_device_mesh("cpu", (world_size,))
    for name, option in (
        *((name, "") for name in OPTIMIZERS),
        ("adamw", "recompute"),
        ("momentum", "sequence_parallel"),
        ("adam", "loop over parameters"),
    ):
        expected = _model(kind=kind)
        expected_optimizer = OPTIMIZERS[name](expected.parameters())
        expected_losses = _train(expected, expected_optimizer)
        rule = {"style": "column_row_mlp", "recompute": option == "recompute"}
        plan = weft.strategy.Plan({"blocks.*.mlp": rule}, sequence_parallel=option == "sequence_parallel")
        model = _model(mesh, plan, kind=kind)
        optimizer = OPTIMIZERS[name](model.parameters())
        if option != "loop over parameters":
            assert fuse(optimizer) is None
        stepper = _by_rows(model, optimizer)
        assert len(stepper.stepped_by_rows) == (6 if kind == "gated" else 4)
        torch.testing.assert_close(_train(model, optimizer), expected_losses, rtol=1e-10, atol=0)
        assert all(parameter.grad is None for parameter in model.parameters())
        for group in optimizer.param_groups:
            group["fused"], group["foreach"] = None, None
        _assert_same(model, optimizer, expected, expected_optimizer)
        stepper.remove()
        _loss(model, 9).backward()
        assert model.get_parameter(stepper.stepped_by_rows[0]).grad is not None


@on_ranks(4)
def test_ranks_without_rows_keep_the_same_states(rank: int, world_size: int) -> None:
    """Of five hidden features ranks have 2, 2, 1 and none."""
    mesh = torch.distributed.init_device_mesh("cpu", (world_size,))
    trained = []
    for by_rows in (False, True):
        torch.manual_seed(1)
        model = weft.parallelize(FeedForward(8, 5, torch.float64), mesh, "auto")
        optimizer = AdamW(model.parameters(), lr=1e-2)
        assert fuse(optimizer) is None
        stepper = StepInBackward(model, optimizer, by_rows=by_rows)
        for step in range(2):
            x = torch.randn(6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
            model(x).square().mean().backward()
            optimizer.step()
        states = [{name: _whole(value) for name, value in state.items()} for state in optimizer.state.values()]
        trained.append(([_whole(parameter) for parameter in model.parameters()], states))
        stepper.remove()
    assert [state["step"].item() for state in trained[1][1]] == [2.0] * 3
    torch.testing.assert_close(*(weights for weights, _ in trained), rtol=1e-12, atol=1e-14)
    for index in range(3):
        torch.testing.assert_close(*(states[index] for _, states in trained), rtol=1e-12, atol=1e-14)


@on_ranks(2)
def test_communicates_as_the_operator_does(rank: int, world_size: int) -> None:
    mesh = torch.distributed.init_device_mesh("cpu", (world_size,))
    of_a_sequence = {"all_gather_into_tensor": 8, "reduce_scatter_tensor": 4, "all_reduce": 4}  # the last of norms
    for plan, expected in (
        (FUSED, {"all_reduce": 4}),
        (weft.strategy.Plan(FUSED, sequence_parallel=True), of_a_sequence),
    ):
        for by_rows in (False, True):
            model = _model(mesh, plan)
            stepper = _by_rows(model, SGD(model.parameters(), lr=0.1)) if by_rows else None
            collectives_of(lambda model=model: _loss(model, 0).backward(), expected=expected)
            if stepper is not None:
                stepper.remove()


@on_ranks(1, 2)
def test_no_gradient_of_a_weight_is_ever_whole(rank: int, world_size: int) -> None:
    """Three equal weights: parameters and two moments of each, and some rows."""
    weight = 512 * 1024 * 4 // world_size
    mesh = torch.distributed.init_device_mesh("cpu", (world_size,))

    with counted() as count:
        model = weft.parallelize(FeedForward(512, 1024), mesh, "auto")
        optimizer = AdamW(model.parameters())
        fuse(optimizer)
        stepper = _by_rows(model, optimizer, block_bytes=1 << 16)
        x = torch.randn(2, 512)
        weft.memory.reset_peak()
        for _ in range(2):  # the first step, which makes the states, too
            model(x).sum().backward()
            assert 9 * weight <= count.peak() <= 9 * weight + (1 << 18)
            optimizer.step()
        stepper.remove()


@on_ranks(2)
def test_gradients_that_are_sums_stay_whole(rank: int, world_size: int) -> None:
    """A block that runs twice, weights that are tied, and those whose hooks want to see their gradient."""
    mesh = torch.distributed.init_device_mesh("cpu", (world_size,))
    expected = _model(order=(0, 1, 0))
    expected_optimizer = AdamW(expected.parameters(), lr=1e-2)
    losses = _train(expected, expected_optimizer)
    model = _model(mesh, order=(0, 1, 0))
    optimizer = AdamW(model.parameters(), lr=1e-2)
    stepper = _by_rows(model, optimizer)
    torch.testing.assert_close(_train(model, optimizer), losses, rtol=1e-10, atol=0)
    _assert_same(model, optimizer, expected, expected_optimizer)
    stepper.remove()

    model = _model(mesh)
    model.blocks[1].mlp.up_proj.weight = model.blocks[0].mlp.up_proj.weight
    stepper = _by_rows(model, SGD(model.parameters(), lr=0.1))
    assert stepper.stepped_by_rows == [
        f"blocks.{index}.mlp.{name}_proj.weight" for index in (0, 1) for name in ("gate", "down")
    ]
    stepper.remove()

    seen: list[tuple[str, torch.Size]] = []
    model = _model(mesh)
    optimizer = SGD(model.parameters(), lr=0.1)
    stepper = _by_rows(model, optimizer)
    gate, up, down = (getattr(model.blocks[0].mlp, f"{name}_proj").weight for name in ("gate", "up", "down"))
    gate.register_hook(lambda grad: seen.append(("gate", grad.shape)))
    up.register_post_accumulate_grad_hook(lambda p: seen.append(("up", p.shape)))
    down.requires_grad_(False)
    before = down.full_tensor()
    _loss(model, 0).backward()
    assert sorted(seen) == [("gate", (HIDDEN, DIM)), ("up", (HIDDEN, DIM))]
    assert torch.equal(down.full_tensor(), before)
    assert stepper.num_stepped == len(list(model.parameters())) - 1
    stepper.remove()


@on_ranks(1)
def test_a_forward_without_backward_and_gradients_of_inputs_alone(rank: int) -> None:
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    model = _model(mesh)
    optimizer = SGD(model.parameters(), lr=0.1)
    stepper = _by_rows(model, optimizer)
    weight = model.blocks[0].mlp.up_proj.weight
    before = weight.full_tensor().clone()
    x = torch.randn(3, DIM, dtype=torch.float64, requires_grad=True)
    [grad] = torch.autograd.grad(model.blocks[0](x).sum(), x)
    assert grad.shape == x.shape and stepper.num_stepped == 0
    kept = model.blocks[0](x)  # whose backward never comes
    assert torch.equal(weight.full_tensor(), before)
    _loss(model, 0).backward()  # beside it the gradient comes whole, and steps once
    assert not torch.equal(weight.full_tensor(), before)
    optimizer.step()
    del kept
    with torch.no_grad():
        model(torch.zeros(1, 2, dtype=torch.long))
    stepper.remove()


@on_ranks(1)
def test_a_gradient_that_is_there_is_added_to(rank: int) -> None:
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    weights = []
    for by_rows in (False, True):
        model = _model(mesh)
        _loss(model, 0).backward()
        stepper = StepInBackward(model, SGD(model.parameters(), lr=0.1), by_rows=by_rows)
        _loss(model, 1).backward()
        weights.append([parameter.full_tensor() for parameter in model.parameters()])
        stepper.remove()
    torch.testing.assert_close(*weights, rtol=0, atol=0)


@on_ranks(1, 2)
@pytest.mark.parametrize("how", ["full", "selective", "compile"])
def test_with_checkpoints_and_compile(rank: int, world_size: int, how: str) -> None:
    mesh = torch.distributed.init_device_mesh("cpu", (world_size,))
    expected = _model()
    losses = _train(expected, SGD(expected.parameters(), lr=0.1))
    model = _model(mesh)
    optimizer = SGD(model.parameters(), lr=0.1)
    if how == "compile":
        for block in model.blocks:
            block.mlp.compile(backend="aot_eager")
    else:
        weft.strategy.checkpoint_activations(model, how)
    stepper = _by_rows(model, optimizer)
    by_rows: list[str] = []
    step = stepper._rows.step
    stepper._rows.step = lambda parameter, *factors: (by_rows.append(""), step(parameter, *factors))
    torch.testing.assert_close(_train(model, optimizer), losses, rtol=1e-10, atol=0)
    assert len(by_rows) == (0 if how == "compile" else 4 * 6)
    for got, value in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(_whole(got), value, rtol=1e-9, atol=1e-11)
    stepper.remove()


@on_ranks(2)
@pytest.mark.parametrize("how", ["autocast", "rule"])
def test_in_half_precision(rank: int, world_size: int, how: str) -> None:
    mesh = torch.distributed.init_device_mesh("cpu", (world_size,))
    plan = {"blocks.*.mlp": {"style": "column_row_mlp", "precision": "bfloat16"}} if how == "rule" else FUSED
    trained = []
    for by_rows in (False, True):
        model = _model(mesh, plan, kind="plain").float()
        optimizer = SGD(model.parameters(), lr=0.1)
        stepper = StepInBackward(model, optimizer, by_rows=by_rows)
        assert len(stepper.stepped_by_rows) == 4 * by_rows
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            loss = _loss(model, 0)
        loss.backward()
        trained.append((loss.item(), [parameter.full_tensor() for parameter in model.parameters()]))
        stepper.remove()
    [(loss, weights), (got_loss, got)] = trained
    assert got_loss == loss
    for value, expected in zip(got, weights, strict=True):
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-5)


@on_ranks(1)
def test_what_is_refused(rank: int) -> None:
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    plain = _model(mesh, {"blocks.*.mlp.up_proj": "column", "blocks.*.mlp.down_proj": "row"})
    with pytest.raises(ValueError, match="optimizer_in_backward='rows' found no fused MLP with weights of its own"):
        StepInBackward(plain, SGD(plain.parameters(), lr=0.1), by_rows=True)

    make = functools.partial(_model, mesh)
    model = make()
    optimizer = SGD(model.parameters(), lr=0.1)
    stepper = _by_rows(model, optimizer)
    with pytest.raises(
        RuntimeError, match=r"'blocks\.1\.mlp\.up_proj\.weight' got another gradient after its rows were"
    ):
        (_loss(model, 0) + 0.0 * model.blocks[1].mlp.up_proj.weight.to_local().sum()).backward()
    optimizer.step()
    stepper.remove()

    model = make()
    optimizer = SGD(model.parameters(), lr=0.1)
    stepper = _by_rows(model, optimizer)
    with pytest.raises(NotImplementedError, match="create_graph=True"):
        _loss(model, 0).backward(create_graph=True)
    optimizer.step()
    _loss(model, 0).backward()
    with pytest.raises(RuntimeError, match="got a gradient from a second backward"):
        _loss(model, 1).backward()
    stepper.remove()
