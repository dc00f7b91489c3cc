"""A small network in three stages: on three GPUs if there are as many, else on three CPU processes.

    python examples/10_three_gpus.py [--samples 96] [--steps 60]
    python examples/10_three_gpus.py --one-process          # no pipelining: a batch visits one device after another

The network classifies points of the plane by which of three rings they are in. Each stage holds one child module.
Without --one-process, a rank computes a stage, and activations are sent from stage to stage in six micro-batches.
Exits with 1 if the loss does not fall by half.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from weft.strategy.pipeline import Pipeline, spread_over_devices

STAGES, MICRO_BATCHES, WIDTH = 3, 6, 64
CUTS = ["middle", "outward"]


class Rings(nn.Module):
    """Points `[batch, 2]` -> logits of three rings `[batch, 3]`."""

    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Sequential(nn.Linear(2, WIDTH), nn.ReLU())
        self.middle = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU())
        self.outward = nn.Linear(WIDTH, 3)

    def forward(self, points: Tensor) -> Tensor:
        hidden = self.inward(points)
        return self.outward(hidden + self.middle(hidden))  # `hidden` crosses two stage boundaries


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=96)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--one-process", action="store_true")
    arguments = parser.parse_args()
    result = in_one_process(arguments) if arguments.one_process else in_three_processes(arguments)
    print(f"on {result['devices']}: loss {result['losses'][0]:.4f}, then {result['losses'][-1]:.4f}")
    print(f"right: {result['right']} of {arguments.samples}")
    return 0 if result["losses"][-1] < 0.5 * result["losses"][0] else 1


def in_three_processes(arguments: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="weft-example-") as folder:
        mp.spawn(run_rank, (folder, arguments), STAGES)
        return json.loads(Path(folder, "result.json").read_text())


def in_one_process(arguments: argparse.Namespace) -> dict[str, Any]:
    on_gpus = torch.cuda.device_count() >= STAGES
    devices = [f"cuda:{stage}" if on_gpus else "cpu" for stage in range(STAGES)]
    torch.manual_seed(0)
    model = spread_over_devices(Rings(), CUTS, devices)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    points, ring = rings(arguments.samples, torch.device(devices[0]))

    losses = []
    for _ in range(arguments.steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(points), ring.to(devices[-1]))  # the logits are on the last device
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    right = int((model(points).argmax(dim=1) == ring.to(devices[-1])).sum())
    where = "three GPUs" if on_gpus else "the CPU three times"
    return {"losses": losses, "right": right, "devices": f"{where}, in one process"}


def rings(num_samples: int, device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ring = torch.arange(num_samples) % 3
    radius = ring + 0.5 + 0.3 * torch.rand(num_samples, generator=generator)
    angle = 2 * torch.pi * torch.rand(num_samples, generator=generator)
    return torch.stack((radius * angle.cos(), radius * angle.sin()), dim=1).to(device), ring.to(device)


def run_rank(rank: int, folder: str, arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    on_gpus = torch.cuda.device_count() >= STAGES
    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:weft,cuda:nccl" if on_gpus else "cpu:weft",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=STAGES,
        timeout=datetime.timedelta(minutes=2),
    )
    torch.manual_seed(0)
    model = Rings().to(device)
    mesh = init_device_mesh(device.type, (STAGES,), mesh_dim_names=("pipeline_parallel",))
    pipeline = Pipeline(model, mesh, CUTS, num_micro_batches=MICRO_BATCHES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    points, ring = rings(arguments.samples, device)

    losses = []
    for _ in range(arguments.steps):
        optimizer.zero_grad()
        loss = pipeline.step((points, ring), lambda batch: F.cross_entropy(model(batch[0]), batch[1]))
        losses.append(loss.item())
        optimizer.step()

    logits = pipeline.evaluate(points, model)  # [] except on the last stage
    if pipeline.has_last_stage:
        right = int((torch.cat(logits).argmax(dim=1) == ring).sum())
        devices = "three GPUs" if on_gpus else "three processes"
        Path(folder, "result.json").write_text(json.dumps({"losses": losses, "right": right, "devices": devices}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
