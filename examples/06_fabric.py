"""The small language model under Fabric: data x tensor parallel, accumulation, clipping, a checkpoint to resume from.

    python examples/06_fabric.py --steps 20 --save /tmp/half                                     # on dp2,tp2
    python examples/06_fabric.py --steps 40 --resume /tmp/half --devices 2 --layout tp2

On CPU a device is a process with one thread. The losses are those of one device for every layout, because every
step uses the same windows of the text, divided over the data-parallel ranks.
"""

from __future__ import annotations

import argparse
import logging
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from model import ModelArgs, Transformer
from text import Windows, documentation_bytes
from torch.utils.data import DataLoader, Subset

from weft.lightning.fabric import WeftModelParallelStrategy

SEED, SEQ_LEN, BATCH_SIZE, MAX_NORM = 0, 128, 16, 1.0


def train(args: argparse.Namespace) -> None:
    """Train on this rank; Fabric starts the other ranks' processes with the same command line."""
    strategy = WeftModelParallelStrategy(plan="auto", layout=args.layout, zero_stage=args.zero_stage)
    fabric = Fabric(accelerator="cpu", devices=args.devices, strategy=strategy)
    fabric.launch()
    fabric.seed_everything(SEED, verbose=False)
    with fabric.init_module(empty_init=True):  # fabric.setup materializes each rank's shards
        model = Transformer(ModelArgs(max_seq_len=SEQ_LEN))
    model = fabric.setup(model)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if args.resume is not None:
        fabric.load(args.resume, state)

    num_micro_batches = args.accumulate * strategy.data_axes.size  # per step, over all data-parallel ranks
    if BATCH_SIZE % num_micro_batches:
        raise ValueError(
            f"{args.accumulate} micro-batches on {strategy.data_axes.size} data-parallel ranks do not divide a batch "
            f"of {BATCH_SIZE}; choose another --accumulate or --layout."
        )
    windows = Windows(documentation_bytes(), args.steps * BATCH_SIZE, SEQ_LEN, SEED)
    remaining = Subset(windows, range(state["step"] * BATCH_SIZE, len(windows)))
    # Fabric's sampler distributes the windows of a step over the data-parallel ranks.
    batches = iter(fabric.setup_dataloaders(DataLoader(remaining, batch_size=BATCH_SIZE // num_micro_batches)))
    for step in range(state["step"], args.steps):
        loss = torch.zeros(())
        for idx in range(args.accumulate):
            tokens, targets = next(batches)
            # Gradients are reduced only with the last micro-batch.
            with fabric.no_backward_sync(model, enabled=idx < args.accumulate - 1):
                scaled_loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()) / args.accumulate
                fabric.backward(scaled_loss)
            loss += scaled_loss.detach()
        norm = fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM)  # the norm before clipping
        optimizer.step()
        optimizer.zero_grad()
        state["step"] = step + 1
        loss = fabric.all_reduce(loss, reduce_op="mean")
        fabric.print(f"step {step}: loss {loss.item():.6f}, gradient norm {norm.item():.6f}")
    if args.save is not None:
        fabric.save(args.save, state)  # a directory, to which each rank writes its shards


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=4, help="number of processes")
    parser.add_argument("--layout", default="dp2,tp2", help="sizes of the mesh's axes rep, dp and tp")
    parser.add_argument("--zero-stage", type=int, default=3, help="what is sharded over dp: from 0, nothing, to 3, all")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps, including those before --resume")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches per step and data-parallel rank")
    parser.add_argument("--save", type=Path, help="write a checkpoint here at the end")
    parser.add_argument("--resume", type=Path, help="resume from this checkpoint, which may be of another layout")
    args = parser.parse_args()
    if min(args.devices, args.steps, args.accumulate) < 1:
        parser.error("--devices, --steps and --accumulate take numbers from 1 up.")
    return args


if __name__ == "__main__":
    arguments = parse_arguments()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    train(arguments)
