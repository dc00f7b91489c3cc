"""A rank that fails in a step, or is gone: what the others are told."""

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


@on_ranks(2)
@pytest.mark.parametrize("kind", ["training", "evaluation"])
def test_the_others_hear_why(rank: int, world_size: int, kind: str) -> None:
    """The last stage's rank leaves its group, as the end of its process would have it do."""
    group = dist.new_group(backend="cpu:weft")
    mesh = DeviceMesh.from_group(group, "cpu")
    for _ in range(2):  # a pipeline of before, whose failure is not this one's
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        pipeline = Pipeline(model, mesh, ["1"], num_micro_batches=2)

    def step(x: Tensor) -> Tensor:
        loss = model(x).sum()
        if x[0, 0] > 0:
            raise KeyError("no such label")
        return loss

    run = pipeline.step if kind == "training" else pipeline.evaluate
    x = torch.tensor([[0.0, 0.0], [1.0, 0.0]])
    if rank == 1:
        with pytest.raises(KeyError, match="no such label"):
            run(x, step)
        dist.destroy_process_group(group)
    elif kind == "training":
        with pytest.raises(weft.PeerLostError, match="Before that rank 1 left the pipeline's step: KeyError: 'no such"):
            run(x, step)
    else:
        run(x, step)  # waits for nobody


LOST = """
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


def test_a_killed_rank_is_named_at_once(tmp_path: Path) -> None:
    result = run_script(LOST, str(tmp_path / "store"), timeout=100)
    assert result.returncode == 0, result.stderr
    seconds, _, text = result.stdout.partition(" ")
    assert float(seconds) < 60  # of the group's timeout of half an hour
    assert "rank 1 (pid" in text and "Before that" not in text
