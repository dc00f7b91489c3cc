"""The small language model on four ranks: two stages, each sharded over two tensor-parallel ranks.

    python examples/09_pipeline_lm.py [--steps 20] [--schedule 1f1b] [--micro-batches 4]

Prints the losses next to those of one device, and the number of parameters on each rank. Exits with 1 if losses differ.
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
from model import ModelArgs, Transformer
from text import Windows, documentation_bytes
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

import weft
from weft.strategy import local_of
from weft.strategy.pipeline import Pipeline

STAGES, TENSOR_RANKS = 2, 2
SEED, SEQ_LEN, BATCH_SIZE = 0, 64, 8
TOLERANCE = 1e-4  # float32, relative to the loss of one device


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--schedule", default="1f1b", choices=["naive", "gpipe", "1f1b", "zero_bubble"])
    parser.add_argument("--micro-batches", type=int, default=4)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="weft-example-") as folder:
        mp.spawn(run_rank, (folder, arguments), STAGES * TENSOR_RANKS)
        result = json.loads(Path(folder, "result.json").read_text())
    for step, (pipelined, full) in enumerate(zip(result["losses"], result["unsplit"], strict=True)):
        print(f"step {step}: loss {pipelined:.6f} on four ranks, {full:.6f} on one device")
    print(f"parameters: {', '.join(map(str, result['parameters']))} on the ranks, {result['all']} in all")
    agree = all(abs(a - b) <= TOLERANCE * b for a, b in zip(result["losses"], result["unsplit"], strict=True))
    return 0 if agree else 1


def next_token_loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    tokens, targets = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def run_rank(rank: int, folder: str, arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "cpu:weft",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=STAGES * TENSOR_RANKS,
        timeout=datetime.timedelta(minutes=5),
    )
    torch.manual_seed(SEED)
    model = Transformer(ModelArgs(max_seq_len=SEQ_LEN))
    full_model = copy.deepcopy(model) if rank == 0 else None
    num_parameters = sum(parameter.numel() for parameter in model.parameters())

    axes = ("pipeline_parallel", "tensor_parallel")
    mesh = init_device_mesh("cpu", (STAGES, TENSOR_RANKS), mesh_dim_names=axes)
    middle = f"layers.{len(model.layers) // 2}"
    pipeline = Pipeline(model, mesh, [middle], schedule=arguments.schedule, num_micro_batches=arguments.micro_batches)
    weft.parallelize(model, mesh, "auto")  # shards the layers of this rank's stage
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    losses = []
    for batch in batches(arguments.steps):
        optimizer.zero_grad()
        losses.append(pipeline.step(batch, lambda micro_batch: next_token_loss(model, micro_batch)).item())
        optimizer.step()

    num_held = [0] * dist.get_world_size()
    dist.all_gather_object(num_held, sum(local.numel() for local in map(local_of, model.parameters())))
    if full_model is not None:
        result = {"losses": losses, "unsplit": train_unsplit(full_model, arguments.steps), "parameters": num_held}
        Path(folder, "result.json").write_text(json.dumps({**result, "all": num_parameters}))
    dist.barrier()
    dist.destroy_process_group()


def batches(num_steps: int) -> DataLoader:
    return DataLoader(Windows(documentation_bytes(), num_steps * BATCH_SIZE, SEQ_LEN, SEED), batch_size=BATCH_SIZE)


def train_unsplit(model: nn.Module, num_steps: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for batch in batches(num_steps):
        optimizer.zero_grad()
        loss = next_token_loss(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    sys.exit(main())
