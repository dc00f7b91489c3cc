"""ResNet-50 in two pipeline stages that balance measured layer times; losses are compared with those of one process.

    python examples/08_pipeline_resnet50.py [--schedule zero_bubble] [--micro-batches 4] [--picture timeline.svg]

The model is torchvision's, unchanged; its forward runs on both ranks, and each rank computes the layers of its stage.
The images are random. Exits with 1 if a loss differs from that of the unsplit model. For speeds, see
benchmarks/pipeline_resnet50.py.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torchvision.models import resnet50

from weft.strategy.pipeline import SCHEDULES, Pipeline, Schedule, balanced_cuts, draw, profile_layers

NUM_STAGES, BATCH, SIZE, NUM_CLASSES, STEPS = 2, 16, 64, 10, 3
TOLERANCE = 1e-3  # float32; in both runs, batch norms see one micro-batch at a time


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedule", default="1f1b", choices=SCHEDULES)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--picture", type=Path, help="draw the planned and the measured timeline here (SVG or HTML)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="weft-example-") as folder:
        mp.spawn(run_rank, (folder, arguments), NUM_STAGES)
        result = json.loads(Path(folder, "result.json").read_text())
    print(f"stages begin at the first layer and at {', '.join(result['cuts'])}")
    for step, (pipelined, full) in enumerate(zip(result["losses"], result["unsplit"], strict=True)):
        print(f"step {step}: loss {pipelined:.6f} in stages, {full:.6f} in one process")
    agree = all(abs(a - b) <= TOLERANCE * b for a, b in zip(result["losses"], result["unsplit"], strict=True))
    return 0 if agree else 1


def loss_of(model: torch.nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def run_rank(rank: int, folder: str, arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "cpu:weft",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=NUM_STAGES,
        timeout=datetime.timedelta(minutes=5),
    )
    torch.manual_seed(0)
    # Residual branches start at zero. Otherwise batch norms over so few pixels amplify rounding errors, and losses
    # differ by 3 % after one step.
    model = resnet50(num_classes=NUM_CLASSES, zero_init_residual=True)
    batch = torch.randn(BATCH, 3, SIZE, SIZE), torch.randint(0, NUM_CLASSES, (BATCH,))
    full_model = copy.deepcopy(model) if rank == 0 else None

    # All ranks need the same cuts, but the times that ranks measure differ: use the cuts of rank 0.
    micro_batch = tuple(tensor[: BATCH // arguments.micro_batches] for tensor in batch)
    cuts = [balanced_cuts(profile_layers(model, micro_batch, lambda b: loss_of(model, b)), NUM_STAGES)]
    dist.broadcast_object_list(cuts)

    mesh = init_device_mesh("cpu", (NUM_STAGES,), mesh_dim_names=("pipeline_parallel",))
    pipeline = Pipeline(model, mesh, cuts[0], schedule=arguments.schedule, num_micro_batches=arguments.micro_batches)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)  # the parameters of this rank's layers
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(pipeline.step(batch, lambda b: loss_of(model, b)).item())
        optimizer.step()

    if arguments.picture is not None:
        traces = pipeline.traces()
        if rank == 0:
            planned = Schedule.generate(arguments.schedule, NUM_STAGES, arguments.micro_batches)
            draw(planned, traces, path=arguments.picture)
    if full_model is not None:
        result = {
            "cuts": cuts[0],
            "losses": losses,
            "unsplit": train_unsplit(full_model, batch, arguments.micro_batches),
        }
        Path(folder, "result.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def train_unsplit(model: torch.nn.Module, batch: tuple[Tensor, Tensor], num_micro_batches: int) -> list[float]:
    """Train the unsplit model in one process, a micro-batch at a time, as batch norms see the data in the pipeline."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        micro_batches = zip(*(tensor.chunk(num_micro_batches) for tensor in batch), strict=True)
        scaled_losses = [loss_of(model, micro_batch) / num_micro_batches for micro_batch in micro_batches]
        torch.stack(scaled_losses).sum().backward()
        optimizer.step()
        losses.append(sum(loss.item() for loss in scaled_losses))
    return losses


if __name__ == "__main__":
    sys.exit(main())
