"""Cases in which row-wise steps fall back to full gradients or raise; results equal those of the optimizer's step."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.optim import SGD, AdamW

import weft
from strategy import row_models as rows
from support.ranks import on_ranks
from weft.strategy import StepInBackward
from weft.strategy.data_parallel import GradientReducer


@on_ranks(2)
def test_summed_gradients_fall_back_to_full(rank: int, world_size: int) -> None:
    """The cases: a block that runs twice, tied weights, and weights with hooks that read their gradient."""
    mesh = torch.distributed.init_device_mesh("cpu", (world_size,))
    expected = rows.blocks_model(order=(0, 1, 0))
    expected_optimizer = AdamW(expected.parameters(), lr=1e-2)
    losses = rows.train_steps(expected, expected_optimizer)
    model = rows.blocks_model(mesh, order=(0, 1, 0))
    optimizer = AdamW(model.parameters(), lr=1e-2)
    stepper = rows.make_row_stepper(model, optimizer)
    torch.testing.assert_close(rows.train_steps(model, optimizer), losses, rtol=1e-10, atol=0)
    rows.assert_same_state(model, optimizer, expected, expected_optimizer)
    stepper.remove()

    model = rows.blocks_model(mesh)
    model.blocks[1].mlp.up_proj.weight = model.blocks[0].mlp.up_proj.weight
    stepper = rows.make_row_stepper(model, SGD(model.parameters(), lr=0.1))
    assert stepper.stepped_by_rows == [
        f"blocks.{index}.mlp.{name}_proj.weight" for index in (0, 1) for name in ("gate", "down")
    ]
    stepper.remove()

    seen: list[tuple[str, torch.Size]] = []
    model = rows.blocks_model(mesh)
    optimizer = SGD(model.parameters(), lr=0.1)
    stepper = rows.make_row_stepper(model, optimizer)
    gate, up, down = (getattr(model.blocks[0].mlp, f"{name}_proj").weight for name in ("gate", "up", "down"))
    gate.register_hook(lambda grad: seen.append(("gate", grad.shape)))
    up.register_post_accumulate_grad_hook(lambda p: seen.append(("up", p.shape)))
    down.requires_grad_(False)
    before = down.full_tensor()
    rows.loss_of(model, 0).backward()
    assert sorted(seen) == [("gate", (rows.HIDDEN, rows.DIM)), ("up", (rows.HIDDEN, rows.DIM))]
    assert torch.equal(down.full_tensor(), before)
    assert stepper.num_stepped == len(list(model.parameters())) - 1
    stepper.remove()


@on_ranks(1)
def test_pending_forward_falls_back_to_full_gradients(rank: int) -> None:
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    model = rows.blocks_model(mesh)
    optimizer = SGD(model.parameters(), lr=0.1)
    stepper = rows.make_row_stepper(model, optimizer)
    weight = model.blocks[0].mlp.up_proj.weight
    before = weight.full_tensor().clone()
    x = torch.randn(3, rows.DIM, dtype=torch.float64, requires_grad=True)
    [grad] = torch.autograd.grad(model.blocks[0](x).sum(), x)
    assert grad.shape == x.shape and stepper.num_stepped == 0
    [grad] = torch.autograd.grad(model.blocks[0](x).sum(), weight)
    assert grad.full_tensor().shape == weight.shape and stepper.num_stepped == 0
    pending = model.blocks[0](x)  # its backward never runs
    assert torch.equal(weight.full_tensor(), before)
    other = rows.blocks_model()
    rows.loss_of(other, 0).backward()
    by_rows = rows.record_row_steps(stepper)
    rows.loss_of(model, 0).backward()  # while `pending` is alive, its block gets full gradients
    assert {id(parameter) for parameter in by_rows} == {id(layer.weight) for layer in model.blocks[1].mlp.children()}
    updated = other.blocks[0].mlp.up_proj.weight.detach() - 0.1 * other.blocks[0].mlp.up_proj.weight.grad
    torch.testing.assert_close(weight.full_tensor(), updated, rtol=1e-12, atol=1e-14)
    optimizer.step()
    del pending
    with torch.no_grad():
        model(torch.zeros(1, 2, dtype=torch.long))
    stepper.remove()


@on_ranks(1)
def test_existing_gradient_is_accumulated(rank: int) -> None:
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    weights = []
    for by_rows in (False, True):
        model = rows.blocks_model(mesh)
        rows.loss_of(model, 0).backward()
        stepper = StepInBackward(model, SGD(model.parameters(), lr=0.1), by_rows=by_rows)
        rows.loss_of(model, 1).backward()
        weights.append([parameter.full_tensor() for parameter in model.parameters()])
        stepper.remove()
    torch.testing.assert_close(*weights, rtol=0, atol=0)


@on_ranks(1)
def test_reducer_falls_back_to_full_gradients(rank: int) -> None:
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    model = rows.blocks_model(mesh)
    reducer = GradientReducer(model, mesh.get_group())
    stepper = rows.make_row_stepper(model, SGD(model.parameters(), lr=0.1))
    by_rows = rows.record_row_steps(stepper)
    rows.loss_of(model, 0).backward()
    assert not by_rows
    stepper.remove()
    reducer.remove()


@on_ranks(1, 2)
@pytest.mark.parametrize("how", ["full", "selective", "compile"])
def test_checkpointed_and_compiled_blocks_match_optimizer_step(rank: int, world_size: int, how: str) -> None:
    mesh = torch.distributed.init_device_mesh("cpu", (world_size,))
    expected = rows.blocks_model()
    losses = rows.train_steps(expected, SGD(expected.parameters(), lr=0.1))
    model = rows.blocks_model(mesh)
    optimizer = SGD(model.parameters(), lr=0.1)
    if how == "compile":
        for block in model.blocks:
            block.mlp.compile(backend="aot_eager")
    else:
        weft.strategy.checkpoint_activations(model, how)
    stepper = rows.make_row_stepper(model, optimizer)
    by_rows = rows.record_row_steps(stepper)
    torch.testing.assert_close(rows.train_steps(model, optimizer), losses, rtol=1e-10, atol=0)
    assert len(by_rows) == (0 if how == "compile" else 4 * 6)
    for got, value in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(rows.full(got), value, rtol=1e-9, atol=1e-11)
    stepper.remove()


@on_ranks(2)
@pytest.mark.parametrize("kind", ["plain", "gated"])
@pytest.mark.parametrize("how", ["autocast", "autocast of float64", "rule"])
def test_half_precision_matches_step_in_backward(rank: int, world_size: int, how: str, kind: str) -> None:
    mesh = torch.distributed.init_device_mesh("cpu", (world_size,))
    plan = {"blocks.*.mlp": {"style": "column_row_mlp", "precision": "bfloat16"}} if how == "rule" else rows.FUSED
    trained = []
    for by_rows in (False, True):
        model = rows.blocks_model(mesh, plan, kind=kind)
        model = model if how == "autocast of float64" else model.float()
        optimizer = SGD(model.parameters(), lr=0.1)
        stepper = StepInBackward(model, optimizer, by_rows=by_rows)
        assert len(stepper.stepped_by_rows) == (6 if kind == "gated" else 4) * by_rows
        with torch.autocast("cpu", torch.bfloat16, enabled=how != "rule"):
            loss = rows.loss_of(model, 0)
        loss.backward()
        trained.append((loss.item(), [parameter.full_tensor() for parameter in model.parameters()]))
        stepper.remove()
    [(loss, weights), (got_loss, got)] = trained
    assert got_loss == loss
    for value, expected in zip(got, weights, strict=True):
        assert value.dtype == (torch.float64 if how == "autocast of float64" else torch.float32)
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-5)


@on_ranks(1)
def test_substituted_weights_get_gradients(rank: int) -> None:
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    weights = []
    for by_rows in (False, True):
        model = rows.blocks_model(mesh)
        stepper = StepInBackward(model, SGD(model.parameters(), lr=0.1), by_rows=by_rows)
        halved = {name: parameter * 0.5 for name, parameter in model.named_parameters()}
        tokens = torch.arange(12).view(2, 6)
        torch.func.functional_call(model, halved, (tokens,)).square().mean().backward()
        weights.append([parameter.full_tensor() for parameter in model.parameters()])
        stepper.remove()
    torch.testing.assert_close(*weights, rtol=0, atol=0)


@on_ranks(1)
def test_graph_after_remove_has_gradients(rank: int) -> None:
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    model = rows.blocks_model(mesh)
    optimizer = SGD(model.parameters(), lr=0.1)
    stepper = StepInBackward(model, optimizer, by_rows=True)
    with pytest.raises(ValueError, match="stepped in its backward already; call remove"):
        StepInBackward(model, optimizer, by_rows=True)
    weight = model.blocks[0].mlp.up_proj.weight
    before = weight.full_tensor().clone()
    loss = rows.loss_of(model, 0)
    stepper.remove()
    loss.backward()
    assert torch.equal(weight.full_tensor(), before) and weight.grad is not None


@on_ranks(1)
def test_old_states_and_before_step_are_supported(rank: int) -> None:
    """A momentum of None starts at the next step; `before_step` gets only rows and parameters."""
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    for name in ("momentum", "adamw"):
        trained = []
        for by_rows in (False, True):
            model = rows.blocks_model(mesh)
            optimizer = rows.OPTIMIZERS[name](model.parameters())
            seen: list[torch.Size] = []
            stepper = StepInBackward(
                model, optimizer, lambda tensor, seen=seen: seen.append(tensor.shape), by_rows=by_rows
            )
            if name == "momentum":
                for parameter in model.parameters():
                    optimizer.state[parameter]["momentum_buffer"] = None
            rows.train_steps(model, optimizer)
            trained.append([parameter.full_tensor() for parameter in model.parameters()])
            assert (1, 1) not in seen and sum(shape.numel() for shape in seen) == 4 * sum(
                parameter.numel() for parameter in model.parameters()
            )
            stepper.remove()
        torch.testing.assert_close(*trained, rtol=1e-12, atol=1e-14)


@on_ranks(1)
def test_unsupported_backwards_raise(rank: int) -> None:
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    plain = rows.blocks_model(mesh, {"blocks.*.mlp.up_proj": "column", "blocks.*.mlp.down_proj": "row"})
    with pytest.raises(ValueError, match="optimizer_in_backward='rows' found no fused MLP with weights of its own"):
        StepInBackward(plain, SGD(plain.parameters(), lr=0.1), by_rows=True)

    make = functools.partial(rows.blocks_model, mesh)
    model = make()
    optimizer = SGD(model.parameters(), lr=0.1)
    stepper = rows.make_row_stepper(model, optimizer)
    with pytest.raises(
        RuntimeError, match=r"'blocks\.1\.mlp\.up_proj\.weight' got another gradient after its rows had"
    ):
        (rows.loss_of(model, 0) + 0.0 * model.blocks[1].mlp.up_proj.weight.to_local().sum()).backward()
    optimizer.step()
    stepper.remove()

    model = make()
    optimizer = SGD(model.parameters(), lr=0.1)
    stepper = rows.make_row_stepper(model, optimizer)
    with pytest.raises(NotImplementedError, match="create_graph=True"):
        rows.loss_of(model, 0).backward(create_graph=True)
    optimizer.step()
    rows.loss_of(model, 0).backward()
    with pytest.raises(RuntimeError, match="got a gradient from a second backward"):
        rows.loss_of(model, 1).backward()
    stepper.remove()
