"""Fused MLPs that step their own weights by rows: the results of the optimizer's step, without full gradients."""

from __future__ import annotations

import pytest
import torch
from ops.collectives.profiled import collectives_of
from ops.memory.counting import counted
from strategy.row_models import (
    FUSED,
    OPTIMIZERS,
    assert_same_state,
    blocks_model,
    full,
    loss_of,
    make_row_stepper,
    record_row_steps,
    train_steps,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import SGD, AdamW

import weft
from support.models import FeedForward
from support.ranks import on_ranks
from weft.strategy import StepInBackward, _plan, fuse
from weft.strategy.optimizers.row_steps import RowSteps


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("kind", ["gated", "plain", "transposed"])
def test_matches_optimizer_step(rank: int, world_size: int, kind: str) -> None:
    mesh = torch.distributed.init_device_mesh("cpu", (world_size,))
    for optimizer_name, option in (
        *((name, "") for name in OPTIMIZERS),
        ("adamw", "recompute"),
        ("momentum", "sequence_parallel"),
        ("adam", "loop over parameters"),
    ):
        expected = blocks_model(kind=kind)
        expected_optimizer = OPTIMIZERS[optimizer_name](expected.parameters())
        expected_losses = train_steps(expected, expected_optimizer)
        rule = {"style": "column_row_mlp", "recompute": option == "recompute"}
        plan = weft.strategy.Plan({"blocks.*.mlp": rule}, sequence_parallel=option == "sequence_parallel")
        model = blocks_model(mesh, plan, kind=kind)
        optimizer = OPTIMIZERS[optimizer_name](model.parameters())
        if option != "loop over parameters":
            assert fuse(optimizer) is None
        stepper = make_row_stepper(model, optimizer)
        assert len(stepper.stepped_by_rows) == (6 if kind == "gated" else 4)
        torch.testing.assert_close(train_steps(model, optimizer), expected_losses, rtol=1e-10, atol=0)
        assert all(parameter.grad is None for parameter in model.parameters())
        for group in optimizer.param_groups:
            group["fused"], group["foreach"] = None, None
        assert_same_state(model, optimizer, expected, expected_optimizer)
        [name, *_] = stepper.stepped_by_rows
        stepper.remove()
        stepper.remove()  # a second call does nothing
        loss_of(model, 9).backward()
        assert model.get_parameter(name).grad is not None


@on_ranks(1, 2)
def test_clipping_by_norm_matches_optimizer_step(rank: int, world_size: int) -> None:
    """The second run of the backward steps by rows; after accumulated batches, full gradients are stepped."""
    mesh = torch.distributed.init_device_mesh("cpu", (world_size,))
    expected, model = blocks_model(), blocks_model(mesh)
    theirs, ours = (OPTIMIZERS["momentum"](each.parameters()) for each in (expected, model))
    assert fuse(ours) is None
    stepper = make_row_stepper(model, ours)
    stepped = record_row_steps(stepper)
    for step, limit in enumerate((0.01, 100, 0.5, 0.02)):
        loss_of(expected, step).backward()
        if step == 2:
            with stepper.accumulating():
                loss_of(model, step).backward()
            continue
        norm = stepper.backward(loss_of(model, step), limit)
        torch.testing.assert_close(
            norm, torch.nn.utils.clip_grad_norm_(expected.parameters(), limit), rtol=1e-10, atol=0
        )
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert len(stepped) == 12
    for group in ours.param_groups:
        group["fused"], group["foreach"] = None, None
    assert_same_state(model, ours, expected, theirs)


@on_ranks(4)
def test_ranks_without_rows_keep_states(rank: int, world_size: int) -> None:
    """The ranks have 2, 2, 1 and 0 of five hidden features."""
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
        states = [{name: full(value) for name, value in state.items()} for state in optimizer.state.values()]
        trained.append(([full(parameter) for parameter in model.parameters()], states))
        stepper.remove()
    assert [state["step"].item() for state in trained[1][1]] == [2.0] * 3
    torch.testing.assert_close(*(weights for weights, _ in trained), rtol=1e-12, atol=1e-14)
    for index in range(3):
        torch.testing.assert_close(*(states[index] for _, states in trained), rtol=1e-12, atol=1e-14)


@on_ranks(2)
def test_collectives_match_operator(rank: int, world_size: int) -> None:
    mesh = torch.distributed.init_device_mesh("cpu", (world_size,))
    sequence_collectives = {
        "all_gather_into_tensor": 8,
        "reduce_scatter_tensor": 4,
        "all_reduce": 4,
    }  # the all-reduces are of the norms' gradients
    for plan, expected in (
        (FUSED, {"all_reduce": 4}),
        (weft.strategy.Plan(FUSED, sequence_parallel=True), sequence_collectives),
    ):
        for by_rows in (False, True):
            model = blocks_model(mesh, plan)
            stepper = make_row_stepper(model, SGD(model.parameters(), lr=0.1)) if by_rows else None
            collectives_of(lambda model=model: loss_of(model, 0).backward(), expected=expected)
            if stepper is not None:
                stepper.remove()


@on_ranks(1, 2)
def test_peak_excludes_full_gradients(rank: int, world_size: int) -> None:
    """The peak is the parameters and two moments of three equal weights, and some rows."""
    weight = 512 * 1024 * 4 // world_size
    mesh = torch.distributed.init_device_mesh("cpu", (world_size,))

    with counted() as count:
        model = weft.parallelize(FeedForward(512, 1024), mesh, "auto")
        optimizer = AdamW(model.parameters())
        fuse(optimizer)
        stepper = make_row_stepper(model, optimizer, block_bytes=1 << 16)
        x = torch.randn(2, 512)
        weft.memory.reset_peak()
        for _ in range(2):  # also in the first step, which creates the states
            model(x).sum().backward()
            assert 9 * weight <= count.peak() <= 9 * weight + (1 << 18)
            optimizer.step()
        stepper.remove()


@pytest.mark.parametrize(("device", "num_blocks"), [("cpu", 86), ("cuda", 4)])
def test_blocks_depend_on_the_device(device: str, num_blocks: int) -> None:
    """A fake tensor replaces a bfloat16 weight of a model of 7 billion parameters."""
    with FakeTensorMode():
        weight = torch.empty(11008, 4096, dtype=torch.bfloat16, device=device)
        left, right = (weight.new_empty(16, size) for size in weight.shape)
        blocks: list[int] = []
        steps = RowSteps(SGD([weight]), lambda _, rows: blocks.append(len(rows.grad)))
        steps.step(weight, left, right)
    assert len(blocks) == num_blocks
    assert sum(blocks) == 11008
    assert set(blocks[:-1]) == {_plan.rows_per_block(device, 11008, 4096 * 2)}
