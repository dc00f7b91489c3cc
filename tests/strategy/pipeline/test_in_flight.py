"""Compares the bytes saved between forwards and backwards with the simulator's micro-batches in flight."""

from __future__ import annotations

import gc

import pytest
import torch
from ops.memory.counting import counted
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from support.ranks import on_ranks
from weft import memory
from weft.strategy._plan import default_stages_per_rank
from weft.strategy.pipeline import SCHEDULES, Pipeline

DIM, HIDDEN, ROWS = 8, 16384, 4  # ROWS: per micro-batch
MICRO_BATCHES = 8
SAVED_BYTES = ROWS * HIDDEN * 4  # bytes that a stage saves for a micro-batch, besides a few rows of DIM
TOLERANCE_BYTES = SAVED_BYTES // 8


def model_of(num_stages: int) -> nn.Sequential:
    """Return a model whose stages each save one hidden tensor per micro-batch."""
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(DIM, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, DIM)) for _ in range(num_stages))
    )


def units_after_each_action(pipeline: Pipeline) -> list[int]:
    """Return the expected number of saved hidden tensors after each of this rank's computations."""
    units, result = 0, []
    for span in pipeline.trace:
        kind, is_first = span.action.kind, span.action.stage == 0
        # The first half of a split backward saves the gradients that reach the hidden layer for the second half; on
        # the first stage, which needs no input gradient, it does nothing.
        units += {"F": 1, "B": -1, "I": 0 if is_first else 1, "W": -1 if is_first else -2}[kind]
        result.append(units)
    return result


@on_ranks(2, 4)
@pytest.mark.parametrize("kind", SCHEDULES)
def test_saved_bytes_match_in_flight(world_size: int, kind: str) -> None:
    num_stages = default_stages_per_rank(kind) * world_size
    model = model_of(num_stages)
    cuts = [str(stage) for stage in range(1, num_stages)]
    mesh = init_device_mesh("cpu", (world_size,))
    pipeline = Pipeline(model, mesh, cuts, schedule=kind, num_micro_batches=MICRO_BATCHES)
    batch = torch.randn(ROWS * MICRO_BATCHES, DIM)
    with counted() as count:
        for _ in range(3):  # the first step allocates the gradients
            before = count.now()
            pipeline.step(batch, lambda x: model(x).sum())
        saved = [num_bytes - pipeline.memory_before for num_bytes in pipeline.memory]
    assert count.now() - before <= TOLERANCE_BYTES
    units = units_after_each_action(pipeline)
    for span, num_bytes, num in zip(pipeline.trace, saved, units, strict=True):
        assert abs(num_bytes - num * SAVED_BYTES) < TOLERANCE_BYTES, (span.action, num_bytes / SAVED_BYTES, num)
    # With one stage per rank, the simulator gives the maximum of its micro-batches in flight.
    simulated = pipeline.schedule(MICRO_BATCHES).simulate()
    if len(pipeline.stages) == 1 and kind != "zero_bubble":
        assert max(units) == simulated.in_flight[pipeline.stages[0]]


@on_ranks(2)
@pytest.mark.parametrize("kind", ["1f1b", "gpipe"])
def test_saved_bytes_are_categorized(rank: int, world_size: int, kind: str) -> None:
    """The peak counts saved activations in their category, and the timeline has forwards and backwards."""
    mesh = init_device_mesh("cpu", (world_size,))
    gc.collect()  # models of earlier cases
    with counted():
        before = memory.by_category()  # of what earlier cases have left
        model = model_of(world_size)
        pipeline = Pipeline(model, mesh, ["1"], schedule=kind, num_micro_batches=MICRO_BATCHES)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batch = torch.randn(ROWS * MICRO_BATCHES, DIM)
        watch = memory.watch(model, optimizer)
        for _ in range(2):
            memory.reset_peak()
            pipeline.step(batch, lambda x: model(x).sum())
        categories = {name: size - before[name] for name, size in memory.by_category(at="peak").items()}
        phases = [phase.name for phase in memory.timeline()]
        watch.remove()
    in_flight = pipeline.schedule(MICRO_BATCHES).simulate().in_flight[rank]
    assert abs(categories["saved_activations"] - in_flight * SAVED_BYTES) < TOLERANCE_BYTES, categories
    parameter_bytes = sum(parameter.nbytes for parameter in model.parameters())
    assert categories["gradients"] == parameter_bytes == categories["parameters"], categories
    assert {"forward", "backward"} <= set(phases)


@on_ranks(2)
def test_received_inputs_count_as_saved(rank: int, world_size: int) -> None:
    """The second stage saves its inputs, which it receives before its forwards."""
    with counted():
        model = nn.Sequential(nn.Linear(DIM, HIDDEN, bias=False), nn.Linear(HIDDEN, DIM, bias=False))
        mesh = init_device_mesh("cpu", (world_size,))
        pipeline = Pipeline(model, mesh, ["1"], schedule="gpipe", num_micro_batches=MICRO_BATCHES)
        batch = torch.randn(ROWS * MICRO_BATCHES, DIM)
        for _ in range(2):
            memory.reset_peak()
            pipeline.step(batch, lambda x: model(x).sum())
        saved = memory.by_category(at="peak")["saved_activations"]
    assert rank == 0 or abs(saved - MICRO_BATCHES * SAVED_BYTES) < TOLERANCE_BYTES, saved


@on_ranks(4)
def test_1f1b_saves_less_than_gpipe(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    most = {}
    for kind in ("gpipe", "1f1b"):
        model = model_of(world_size)
        pipeline = Pipeline(model, mesh, ["1", "2", "3"], schedule=kind, num_micro_batches=MICRO_BATCHES)
        batch = torch.randn(ROWS * MICRO_BATCHES, DIM)
        with counted():
            for _ in range(2):
                pipeline.step(batch, lambda x, model=model: model(x).sum())
            most[kind] = max(pipeline.memory) - pipeline.memory_before
    assert abs(most["gpipe"] - MICRO_BATCHES * SAVED_BYTES) < TOLERANCE_BYTES
    assert abs(most["1f1b"] - (world_size - rank) * SAVED_BYTES) < TOLERANCE_BYTES
