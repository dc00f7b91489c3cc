"""A pipeline of two stages written with send and receive operators, compared with the unsplit model.

    python examples/11_pipeline_messages.py

Rank 0 has the first layers and sends their results; rank 1 has the last layers and the loss, and sends the gradients of
these results back. The script starts its ranks itself and exits with 1 if a gradient differs from that of the unsplit
model.
"""

from __future__ import annotations

import datetime
import json
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

import weft

NUM_STAGES = 2
DIM, HIDDEN, NUM_CLASSES = 8, 16, 4
BATCH_SIZES = (3, 5, 2, 4)  # of the micro-batches
TOLERANCE = 1e-12  # float64


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="weft-example-") as folder:
        mp.spawn(run_rank, (folder,), NUM_STAGES)
        result = json.loads(Path(folder, "result.json").read_text())
    for stage, difference in enumerate(result):
        print(f"stage {stage}: largest difference of a gradient from the unsplit model's: {difference:.1e}")
    return 0 if max(result) <= TOLERANCE else 1


def full_model() -> nn.Sequential:
    """Return the unsplit model, the same on every rank; the first two layers are stage 0."""
    torch.manual_seed(0)
    layers = (nn.Linear(DIM, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, DIM), nn.Tanh(), nn.Linear(DIM, NUM_CLASSES))
    return nn.Sequential(*layers).double()


def micro_batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    x, y = torch.randn(sum(BATCH_SIZES), DIM).double(), torch.randint(0, NUM_CLASSES, (sum(BATCH_SIZES),))
    return list(zip(x.split(BATCH_SIZES), y.split(BATCH_SIZES), strict=True))


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return a micro-batch's contribution to the mean loss over the samples of all micro-batches."""
    return F.cross_entropy(logits, targets, reduction="sum") / sum(BATCH_SIZES)


def train_first_stage(stage: nn.Module, group: str) -> None:
    tokens = [weft.ops.pipeline_send([stage(x)], peer=1, channel=0, group_name=group) for x, _ in micro_batches()]
    # This stage has no loss. The backward of a zero, joined with the tokens, waits for all gradients of sent tensors.
    weft.ops.join(torch.zeros(()), tokens).backward()


def train_last_stage(stage: nn.Module, group: str) -> None:
    # `like` gives a message's dtype, shape and requires_grad. All receives are posted before any message has arrived.
    like = torch.empty((), dtype=torch.float64, requires_grad=True)
    tokens = [
        weft.ops.pipeline_recv([like.expand(size, HIDDEN)], peer=0, channel=0, group_name=group) for size in BATCH_SIZES
    ]
    for token, (_, targets) in zip(tokens, micro_batches(), strict=True):
        (hidden,) = weft.ops.pipeline_wait(token)
        loss_of(stage(hidden), targets).backward()


def run_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "cpu:weft",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=NUM_STAGES,
        timeout=datetime.timedelta(minutes=2),
    )
    group = dist.group.WORLD.group_name
    stages = full_model()[:2], full_model()[2:]
    (train_last_stage if rank else train_first_stage)(stages[rank], group)
    weft.ops.pipeline_flush(group)

    full = full_model()
    for x, targets in micro_batches():
        loss_of(full(x), targets).backward()
    pairs = zip(stages[rank].parameters(), (full[:2], full[2:])[rank].parameters(), strict=True)
    worst = torch.stack(
        [(stage_parameter.grad - full_parameter.grad).abs().max() for stage_parameter, full_parameter in pairs]
    ).max()
    differences = [torch.empty_like(worst) for _ in range(NUM_STAGES)]
    dist.all_gather(differences, worst)
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps([difference.item() for difference in differences]))
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
