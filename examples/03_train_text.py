"""Trains a small Llama-style language model on Python's own documentation, byte by byte, tensor-parallel.

    python examples/03_train_text.py                      # on 1 device, then on 2; compares the runs
    python examples/03_train_text.py --devices 4          # one run
    python examples/03_train_text.py --devices 1 2 4 --size medium --steps 400 --plan examples/plan.yaml

A device is a CPU process with one thread. Each of several device counts trains in a separate process tree, because a
process group lives as long as its process. The exit status is then 1 if a run misses a limit of side_by_side.py: on its
difference from the first run or, from 150 steps on, on its loss.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from model import ModelArgs, Transformer
from side_by_side import Run, table, verdict
from text import Windows, documentation_bytes
from torch import Tensor
from torch.utils.data import DataLoader

import weft.strategy
from weft.lightning import WeftModelParallelStrategy

SEED, SEQ_LEN, BATCH_SIZE = 0, 128, 16
SIZES = {
    "small": ModelArgs(dim=128, n_layers=4, n_heads=4, hidden_dim=384, max_seq_len=SEQ_LEN),
    "medium": ModelArgs(dim=256, n_layers=6, n_heads=8, hidden_dim=768, max_seq_len=SEQ_LEN),
    "large": ModelArgs(dim=512, n_layers=8, n_heads=8, hidden_dim=1536, max_seq_len=SEQ_LEN),
}


class LitTransformer(L.LightningModule):
    """Next-byte prediction. An ordinary LightningModule, without code for sharding."""

    def __init__(self, args: ModelArgs, num_steps: int) -> None:
        super().__init__()
        self.model = Transformer(args)
        self.args, self.num_steps = args, num_steps
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, targets = batch
        loss = F.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())
        self.log("loss", loss, prog_bar=True)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(
            self.parameters(), lr=3e-3 * 128 / self.args.dim, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self.lr_factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def lr_factor(self, step: int) -> float:
        """Return the learning rate's factor: linear warm-up over a tenth of the steps, then a cosine from 1 to 0.1."""
        warm_up = max(1, self.num_steps // 10)
        progress = max(0, step - warm_up) / max(1, self.num_steps - warm_up)
        return min((step + 1) / warm_up, 0.55 + 0.45 * math.cos(math.pi * progress))

    def on_train_start(self) -> None:
        self.start = time.perf_counter()

    def on_train_batch_end(self, *_: object) -> None:
        self.seconds.append(time.perf_counter() - self.start)


def train(args: argparse.Namespace) -> None:
    """Train on this rank; Lightning starts the other ranks' processes with the same command line."""
    os.environ["OMP_NUM_THREADS"] = "1"  # otherwise Lightning chooses a number by the device count
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    warnings.filterwarnings("ignore", ".*treespec.*is deprecated.*")  # Lightning's own use of torch
    for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)

    L.seed_everything(SEED, verbose=False)
    module = LitTransformer(SIZES[args.size], args.steps)
    windows = Windows(documentation_bytes(), args.steps * BATCH_SIZE, SEQ_LEN, SEED)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=args.devices[0],
        strategy=WeftModelParallelStrategy(plan=args.plan),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(windows, batch_size=BATCH_SIZE))
    if not trainer.is_global_zero:
        return
    parameters = list(module.parameters())
    run = Run(
        devices=args.devices[0],
        num_parameters=sum(p.numel() for p in parameters),
        num_parameters_local=sum(p.to_local().numel() for p in parameters),
        tokens_per_step=BATCH_SIZE * SEQ_LEN,
        losses=module.losses,
        seconds=module.seconds,
    )
    if args.result is not None:
        run.save(args.result)
    else:
        print(weft.strategy.report(module))
        print(table([run]))


def train_in_processes(args: argparse.Namespace) -> list[Run]:
    """Train in one process tree per device count, one after the other, and return the results of all."""
    runs = []
    with tempfile.TemporaryDirectory(prefix="weft-demo-") as folder:
        for devices in args.devices:
            print(f"training on {devices} device{'s' if devices > 1 else ''}", flush=True)
            result = Path(folder, f"{devices}.json")
            command = [sys.executable, __file__, "--devices", str(devices), "--result", str(result)]
            command += ["--plan", args.plan, "--size", args.size, "--steps", str(args.steps)]
            process = subprocess.Popen(command)
            try:
                status = process.wait()
            finally:
                process.terminate()
                process.wait()
            if status != 0:
                raise SystemExit(f"training on {devices} device(s) ended with status {status}: see above.")
            runs.append(Run.load(result))
    return runs


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2], help="one or more device counts")
    parser.add_argument("--plan", default="auto", help="'auto', or the path of a YAML or JSON plan")
    parser.add_argument("--size", choices=SIZES, default="small", help="size of the model")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps")
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)  # where to write the run's figures
    args = parser.parse_args()
    if min(args.devices) < 1 or args.steps < 1:
        parser.error(f"got --devices {args.devices} --steps {args.steps}; both take numbers from 1 up.")
    return args


def main() -> int:
    args = parse_arguments()
    if len(args.devices) == 1:
        train(args)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    runs = train_in_processes(args)
    lines, good = verdict(runs)
    print("", table(runs), "", *lines, sep="\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
