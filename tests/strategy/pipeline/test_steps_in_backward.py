"""The optimizer's step inside of a schedule: weights equal those of the usual step, and gradients are freed."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from strategy.pipeline.test_composition import PLAN, llama, next_token
from strategy.pipeline.test_pipeline_parity import SEVERAL_STAGES, V_SHAPED
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import SGD, AdamW, Optimizer

import weft
from support.models import token_batches
from support.parity import assert_close
from support.ranks import on_ranks
from weft.strategy import StepInBackward
from weft.strategy.pipeline import SCHEDULES, Pipeline

NAMES = ("pipeline_parallel", "data_parallel", "tensor_parallel")
BATCHES = token_batches(4, 37)  # two steps, if two batches are accumulated
OPTIMIZERS: dict[str, Any] = {
    "momentum": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: AdamW(p, lr=1e-2),
}


@functools.cache
def train_on_one_device(name: str, tie_head: bool, num_accumulated: int) -> dict[str, Tensor]:
    """Return the weights that the optimizer of this name gives in all schedules."""
    model = llama(tie_head)
    optimizer = OPTIMIZERS[name](model.parameters())
    for idx, batch in enumerate(BATCHES):
        next_token(model, batch).backward()
        if idx % num_accumulated == num_accumulated - 1:
            optimizer.step()
            optimizer.zero_grad()
    return {key: parameter.detach() for key, parameter in model.named_parameters(remove_duplicate=False)}


def train_in_stages(
    pipeline: Pipeline, optimizer: Optimizer, batches: list[tuple[Tensor, Tensor]], num_accumulated: int
) -> None:
    stepper = StepInBackward(pipeline.model, optimizer)
    for idx, batch in enumerate(batches):
        if idx % num_accumulated == num_accumulated - 1:
            pipeline.step(batch, lambda each: next_token(pipeline.model, each), stepper=stepper)
            assert stepper.num_stepped == len(list(pipeline.model.parameters()))
            assert all(parameter.grad is None for parameter in pipeline.model.parameters())
            optimizer.step()
            assert stepper.num_stepped == 0
        else:
            with stepper.accumulating():
                pipeline.step(batch, lambda each: next_token(pipeline.model, each), stepper=stepper)
    stepper.remove()


@on_ranks(2, 4)
@pytest.mark.parametrize("kind", SCHEDULES)
def test_every_schedule_matches_one_device(world_size: int, kind: str) -> None:
    """On four ranks, stages are fully sharded over two data-parallel ranks."""
    sizes = (2, world_size // 2, 1)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=NAMES)
    can_tie = world_size == 2 or kind not in V_SHAPED  # FSDP2 does not shard tied layers of one rank
    for optimizer, tie_head, num_accumulated in (("momentum", can_tie, 1), ("adamw", False, 2)):
        model = llama(tie_head)
        cuts = [f"layers.{idx}" for idx in ((1, 2, 3) if kind in SEVERAL_STAGES else (2,))]
        pipeline = Pipeline(model, mesh, cuts, schedule=kind, num_micro_batches=2)
        weft.parallelize(model, mesh, PLAN)
        data = mesh["data_parallel"]
        if world_size == 4:
            pipeline.fully_shard(data)
        batches = [tuple(each.chunk(data.size())[data.get_local_rank()] for each in batch) for batch in BATCHES]
        train_in_stages(pipeline, OPTIMIZERS[optimizer](model.parameters()), batches, num_accumulated)
        values = train_on_one_device(optimizer, tie_head, num_accumulated)
        for name, parameter in model.named_parameters():
            assert_close(name, parameter.full_tensor(), values[name], 1e-10 * values[name].norm().item())


@on_ranks(2)
def test_gradients_of_a_stage_are_freed_in_its_last_backward(rank: int) -> None:
    """The hook runs after the step of each layer, from the stage's last one to its first."""
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8)))
    pipeline = Pipeline(model, mesh, ["4"], num_micro_batches=2)
    optimizer = SGD(model.parameters(), lr=0.1)
    stepper = StepInBackward(model, optimizer)
    found: list[int] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _: found.append(sum(each.grad is not None for each in model.parameters()))
        )
    pipeline.step(torch.randn(4, 256), lambda x: model(x).square().mean(), stepper=stepper)
    assert found == [1, 2, 3, 4, 3, 2, 1, 0]
    optimizer.step()


@on_ranks(2)
def test_errors(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pipeline = Pipeline(model, mesh, ["1"], num_micro_batches=2)
    optimizer = SGD(model.parameters(), lr=0.1)
    stepper = StepInBackward(model, optimizer)
    batch, step = torch.randn(4, 4), lambda x: model(x).square().mean()
    before = copy.deepcopy([parameter.detach() for parameter in model.parameters()])
    pipeline.step(batch, step, stepper=stepper)
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    with pytest.raises(RuntimeError, match=r"2 parameters were stepped by an earlier batch"):
        pipeline.step(batch, step, stepper=stepper)
