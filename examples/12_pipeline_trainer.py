"""The small language model in pipeline stages under the Trainer: an ordinary LightningModule, validated and resumed.

    python examples/12_pipeline_trainer.py --epochs 1 --save /tmp/half                          # two stages
    python examples/12_pipeline_trainer.py --epochs 2 --resume /tmp/half --layout pp4
    python examples/12_pipeline_trainer.py --epochs 2 --layout none                             # one device
    python examples/12_pipeline_trainer.py --layout pp2,tp2 --report /tmp/run                   # an HTML page

On CPU a device is a process with one thread. The losses are those of one device for every layout and schedule.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from model import ModelArgs, Transformer
from text import Windows, documentation_bytes
from torch import Tensor
from torch.utils.data import DataLoader, Subset
from torchmetrics.classification import MulticlassAccuracy

from weft.lightning import Report, WeftModelParallelStrategy
from weft.strategy.pipeline import draw

SEED, SEQ_LEN, BATCH_SIZE, STEPS, VALIDATION_BATCHES = 0, 64, 8, 6, 2
MICRO_BATCHES = 4
ARGS = ModelArgs(max_seq_len=SEQ_LEN)


class LitTransformer(L.LightningModule):
    """Next-byte prediction, without code for stages."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(ARGS.vocab_size, average="micro")

    def configure_model(self) -> None:
        self.model = Transformer(ARGS)  # under weft, a rank materializes only the layers of its stages

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, targets = batch
        logits = self.model(tokens)
        if not self.training:
            self.accuracy(logits.flatten(0, 1), targets.flatten())
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_epoch=True, on_step=False)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.log("val_loss", self.loss(batch))
        self.log("val_accuracy", self.accuracy)

    def on_train_epoch_end(self) -> None:
        found = {name: value.item() for name, value in self.trainer.callback_metrics.items()}
        self.print(
            f"epoch {self.current_epoch}: loss {found['loss']:.5f}, validation loss {found['val_loss']:.5f}, "
            f"accuracy {found['val_accuracy']:.4f}"
        )

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)  # under weft, those of this rank's stages
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def strategy_of(args: argparse.Namespace, num_stages: int) -> Any:
    if args.layout == "none":
        return "auto"
    layers_of_stage = ARGS.n_layers / num_stages
    return WeftModelParallelStrategy(
        plan="auto",
        layout=args.layout,
        pipeline_module="model",
        pipeline_cuts=[f"layers.{round(stage * layers_of_stage)}" for stage in range(1, num_stages)],
        pipeline_schedule=args.schedule,
        num_micro_batches=MICRO_BATCHES,
    )


def train(args: argparse.Namespace) -> None:
    sizes = [int(size) for size in re.findall(r"\d+", args.layout)] or [1]
    num_stages = sizes[0] if args.layout.startswith("pp") else 1
    strategy = strategy_of(args, num_stages)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=torch.tensor(sizes).prod().item(),
        strategy=strategy,
        callbacks=[Report(args.report, every_n_steps=1)] if args.report is not None else [],
        max_epochs=args.epochs,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        # All ranks compute the same batches, in the order of the data; Lightning's sampler would shuffle them.
        use_distributed_sampler=False,
    )
    L.seed_everything(SEED, verbose=False)
    windows = Windows(documentation_bytes(), (STEPS + VALIDATION_BATCHES) * BATCH_SIZE, SEQ_LEN, SEED)
    training, validation = (
        Subset(windows, range(*bounds)) for bounds in ((STEPS * BATCH_SIZE,), (STEPS * BATCH_SIZE, len(windows)))
    )
    module = LitTransformer()
    trainer.fit(module, DataLoader(training, BATCH_SIZE), DataLoader(validation, BATCH_SIZE), ckpt_path=args.resume)
    if args.save is not None:
        trainer.save_checkpoint(args.save)  # a directory of all stages; without weft, a file
    if args.picture is not None and args.layout != "none":
        traces = strategy.pipeline.traces()  # each rank's trace of the last batch, from validation
        if trainer.is_global_zero:
            draw(strategy.pipeline.schedule(MICRO_BATCHES, forward_only=True), traces, path=args.picture)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layout", default="pp2", help="'pp2', 'pp2,tp2', ...; 'none': one device, without weft")
    parser.add_argument("--schedule", default="1f1b", choices=["naive", "gpipe", "1f1b", "zero_bubble"])
    parser.add_argument("--epochs", type=int, default=2, help="epochs, including those before --resume")
    parser.add_argument("--save", type=Path, help="write a checkpoint here at the end")
    parser.add_argument("--resume", type=Path, help="resume from this checkpoint, which may be of another layout")
    parser.add_argument("--picture", type=Path, help="draw the timeline of the last validation batch here")
    parser.add_argument("--report", type=Path, help="write a report of the run to this directory")
    args = parser.parse_args()
    if not re.fullmatch(r"none|pp\d+(,tp\d+)?", args.layout):
        parser.error("--layout is 'none', or stages and tensor-parallel ranks as in 'pp2' and 'pp2,tp2'.")
    if args.report is not None and args.layout == "none":
        parser.error("--report is for stages, not for --layout none.")
    return args


if __name__ == "__main__":
    arguments = parse_arguments()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    train(arguments)
