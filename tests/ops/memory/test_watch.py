"""The hooks of `watch` assign every byte of a training loop to a category."""

from __future__ import annotations

import pytest
import torch
from ops.memory.counting import counted
from torch import nn

import weft
from support.ranks import on_ranks

TOKENS, WIDTH, HIDDEN = 64, 128, 512
WEIGHTS = 2 * WIDTH * HIDDEN * 4


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN, bias=False), nn.ReLU(), nn.Linear(HIDDEN, WIDTH, bias=False))


@on_ranks(1)
def test_bytes_of_training_loop_by_category(rank: int) -> None:
    with counted() as count:
        model = _model()
        assert count.now() == count.now("other") == WEIGHTS
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        watch = weft.memory.watch(model, optimizer)
        assert count.now() == count.now("parameters") == WEIGHTS
        x = torch.randn(TOKENS, WIDTH)

        output = model(x)
        # The batch, the input of the second layer, which is the output of the ReLU, and the model's output.
        assert count.now("saved_activations") == x.nbytes + (TOKENS * HIDDEN + TOKENS * WIDTH) * 4
        assert (count.now("scratch"), count.now("other")) == (0, 0)
        loss = output.square().sum()
        loss.backward()
        assert count.now("gradients") == WEIGHTS
        optimizer.step()
        states = 2 * WEIGHTS + 2 * 4  # and a step count for each parameter
        assert count.now("optimizer_state") == states
        # The peak is in the step, which allocates one temporary as large as all weights (foreach).
        assert count.peak() == count.peak("parameters") + count.peak("gradients") + count.peak(
            "optimizer_state"
        ) + count.peak("scratch") + count.peak("saved_activations") + count.peak("other")
        assert (count.peak("parameters"), count.peak("gradients"), count.peak("optimizer_state")) == (
            WEIGHTS,
            WEIGHTS,
            states,
        )
        assert WEIGHTS <= count.peak("scratch") <= 2 * WEIGHTS
        assert count.peak("other") == 0
        optimizer.zero_grad()
        del output, loss
        names = [phase.name for phase in weft.memory.timeline()]
        assert names == ["test", "forward", "backward", "step", "between steps"]
        by_name = {phase.name: phase.peak for phase in weft.memory.timeline()}
        assert by_name["forward"]["gradients"] == by_name["forward"]["optimizer_state"] == 0
        assert by_name["backward"]["saved_activations"] >= TOKENS * HIDDEN * 4

        watch.remove()
        model(x).sum().backward()
        assert [phase.name for phase in weft.memory.timeline()] == names


@on_ranks(1)
def test_other_excludes_loop_memory(rank: int) -> None:
    """Accumulation, inference, gradients from before `watch`: no memory of the loop is "other"."""
    with counted() as count:
        before = weft.memory.by_category()["other"]
        model = _model()
        model(torch.ones(1, WIDTH)).sum().backward()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        watch = weft.memory.watch(model, optimizer)
        x = torch.randn(TOKENS, WIDTH)
        for _ in range(2):
            for _ in range(2):
                nn.functional.mse_loss(model(x), x).backward()
            assert count.now("gradients") == WEIGHTS
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model(x)
        assert count.now("optimizer_state") == WEIGHTS
        assert (count.now("other"), count.now("saved_activations")) == (0, x.nbytes)
        phases = [phase for phase in weft.memory.timeline() if phase.name != "test"]
        assert all(phase.peak["other"] - before <= x.nbytes for phase in phases)
        assert [phase.name for phase in weft.memory.timeline()].count("inference") == 2
        watch.remove()


@on_ranks(2)
@pytest.mark.parametrize("plan", [{"*.0": "column", "*.2": "row"}])
def test_local_shards_are_counted(rank: int, world_size: int, plan: dict[str, str]) -> None:
    """The local shard of a DTensor counts, and its gradients count as gradients."""
    mesh = torch.distributed.init_device_mesh("cpu", (world_size,))
    with counted() as count:
        model = nn.ModuleDict({"mlp": _model()})
        model.forward = model["mlp"].forward  # type: ignore[method-assign]
        weft.parallelize(model, mesh, plan)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        watch = weft.memory.watch(model, optimizer)
        assert count.now("parameters") == count.now() == WEIGHTS // world_size
        model(torch.randn(TOKENS, WIDTH)).square().sum().backward()
        optimizer.step()
        assert count.now("gradients") == WEIGHTS // world_size
        assert count.now("optimizer_state") == 2 * WEIGHTS // world_size + 2 * 4
        watch.remove()
