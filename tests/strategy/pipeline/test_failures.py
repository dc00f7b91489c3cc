"""A rank that fails in a step or is lost: the errors that the other ranks raise."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import weft
from support.processes import run_script
from support.ranks import on_ranks
from weft.strategy.pipeline import Pipeline


class Failing:
    """A step that fails on the last stage for inputs above zero."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        self.pipeline = Pipeline(self.model, mesh, ["1"], num_micro_batches=2)

    def __call__(self, x: Tensor) -> Tensor:
        loss = self.model(x).sum()
        if x[0, 0] > 0:
            raise KeyError("no such label")
        return loss


VALID, FAILING = torch.zeros(2, 2), torch.tensor([[0.0, 0.0], [1.0, 0.0]])


@on_ranks(2)
@pytest.mark.parametrize("kind", ["training", "evaluation"])
def test_peers_quote_failure(rank: int, world_size: int, kind: str) -> None:
    """The last stage's rank destroys its group, as the exit of its process does."""
    group = dist.new_group(backend="cpu:weft")
    step = Failing(DeviceMesh.from_group(group, "cpu"))
    run = step.pipeline.step if kind == "training" else step.pipeline.evaluate
    run(VALID, step)
    if rank == 1:
        with pytest.raises(KeyError, match="no such label"):
            run(FAILING, step)
        dist.destroy_process_group(group)
        return
    with (
        pytest.raises(
            weft.PeerLostError, match=r"^rank 1 left the pipeline's step: KeyError: 'no such label'; rank 0, wh"
        ),
        step.pipeline.failures.report_failures(),
    ):
        run(FAILING, step)
        dist.all_reduce(torch.ones(1), group=group)  # in an evaluation the first stage receives nothing


@on_ranks(2)
def test_earlier_failures_are_not_quoted(rank: int, world_size: int) -> None:
    """Failures of another pipeline, or of a step that failed on all ranks, are not quoted."""
    group = dist.new_group(backend="cpu:weft")
    mesh = DeviceMesh.from_group(group, "cpu")
    earlier, step = Failing(mesh), Failing(mesh)
    for failures in (earlier.pipeline.failures, step.pipeline.failures):
        with pytest.raises(ValueError, match="of all ranks"), failures.report_failures():
            raise ValueError("of all ranks")
    step.pipeline.step(VALID, step)
    if rank == 1:
        dist.destroy_process_group(group)
        return
    with pytest.raises(weft.PeerLostError) as failure:
        step.pipeline.step(VALID, step)
    assert "left the pipeline" not in str(failure.value)


class Changing(nn.Module):
    """Its output depends on an attribute that changes after the recording."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.mode = nn.Linear(2, 2), "as recorded"

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.mode == "frozen":
            return y.detach()
        return torch.cat((y, y)) if self.mode == "longer" else y


CHANGES = {
    "longer": r"stage 0 sends \(2, 2\) torch.float32 where \(1, 2\) torch.float32 was recorded; let shapes follow from",
    "thawed": r"of shape \(1, 2\) that leaves stage 0 requires a gradient, and did not when it was recorded; freeze",
}


@on_ranks(2)
@pytest.mark.parametrize("mode", CHANGES)
def test_changed_boundary_values_raise(rank: int, world_size: int, mode: str) -> None:
    """The sending rank raises, and the waiting rank quotes its error."""
    group = dist.new_group(backend="cpu:weft")
    layer = Changing()
    layer.mode = "frozen" if mode == "thawed" else "as recorded"
    model = nn.Sequential(layer, nn.Linear(2, 2))
    pipeline = Pipeline(model, DeviceMesh.from_group(group, "cpu"), ["1"], num_micro_batches=2)
    pipeline.step(VALID, lambda x: model(x).sum())
    if rank == 1:
        with pytest.raises(weft.PeerLostError, match=f"^rank 0 left .*Error: .*{CHANGES[mode]}.*; rank 1, which"):
            pipeline.step(VALID, lambda x: model(x).sum())
        return
    layer.mode = mode
    with pytest.raises(RuntimeError, match=CHANGES[mode]):
        pipeline.step(VALID, lambda x: model(x).sum())
    dist.destroy_process_group(group)


KILLED_RANK = """
import os, signal, sys, time
import torch, torch.distributed as dist
from torch import nn
import weft
from torch.distributed.device_mesh import DeviceMesh
from weft.strategy.pipeline import Pipeline

rank = 0 if os.fork() else 1
dist.init_process_group("cpu:weft", store=dist.FileStore(sys.argv[1], 2), rank=rank, world_size=2)
model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
pipeline = Pipeline(model, DeviceMesh("cpu", [0, 1]), ["1"], num_micro_batches=2)

def step(x):
    loss = model(x).sum()
    os.kill(os.getpid(), signal.SIGKILL)
    return loss

start = time.monotonic()
try:
    pipeline.step(torch.ones(2, 2), step)
except weft.PeerLostError as error:
    print(f"{time.monotonic() - start:.3f} {error}", flush=True)
"""


def test_killed_rank_is_named_immediately(tmp_path: Path) -> None:
    result = run_script(KILLED_RANK, str(tmp_path / "store"), timeout=100, warm_processes=1)
    assert result.returncode == 0, result.stderr
    seconds, _, text = result.stdout.partition(" ")
    assert float(seconds) < 60  # the group's timeout is half an hour
    assert "rank 1 (pid" in text and "left the pipeline" not in text
