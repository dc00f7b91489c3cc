"""The small language model on long sequences: context-parallel ranks compute a shard of the tokens each.

    python examples/14_long_context.py                                              # 4,096 tokens on cp2
    python examples/14_long_context.py --devices 1 --layout cp1                     # one device
    python examples/14_long_context.py --devices 4 --layout dp2,cp2 --tokens 2048
    python examples/14_long_context.py --devices 4 --layout cp2,tp2 --attention ulysses

Prints the losses, which are those of one device for every layout, and the peak memory of each rank. The module has no
code for sharding: the batch, the positions and the loss are those of the full sequence. On CPU a device is a process
with one thread.
"""

from __future__ import annotations

import argparse
import logging
import os
import warnings

import lightning as L
import torch
import torch.nn.functional as F
from model import ModelArgs, Transformer
from text import Windows, documentation_bytes
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from weft.lightning import MemoryMonitor, WeftModelParallelStrategy

SEED, BATCH_SIZE = 0, 2


class LitTransformer(L.LightningModule):
    """Next-byte prediction, without code for sharding."""

    def __init__(self, num_tokens: int, num_steps: int) -> None:
        super().__init__()
        self.num_tokens, self.num_steps = num_tokens, num_steps

    def configure_model(self) -> None:
        self.model = Transformer(ModelArgs(max_seq_len=self.num_tokens))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, targets = batch
        loss = F.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())
        self.log("loss", loss, sync_dist=True)  # the mean over data-parallel ranks
        return loss

    def on_train_batch_end(self, *_: object) -> None:
        self.print(f"step {self.global_step}: loss {self.trainer.callback_metrics['loss'].item():.6f}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """Return a loader of windows, which data-parallel ranks divide; context-parallel ranks get the same ones."""
        replicas = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        windows = Windows(documentation_bytes(), self.num_steps * BATCH_SIZE, self.num_tokens, SEED)
        sampler = DistributedSampler(windows, shuffle=False, **replicas)
        return DataLoader(windows, batch_size=BATCH_SIZE // replicas["num_replicas"], sampler=sampler)


def train(args: argparse.Namespace) -> None:
    """Train on this rank; Lightning starts the other ranks' processes with the same command line."""
    L.seed_everything(SEED, verbose=False)
    memory = MemoryMonitor()
    strategy = WeftModelParallelStrategy(
        plan="auto",
        layout=args.layout,
        context_attention=args.attention,
        activation_checkpointing="full" if args.checkpoint else "none",
    )
    trainer = L.Trainer(
        accelerator="cuda" if torch.cuda.is_available() else "cpu",
        devices=args.devices,
        strategy=strategy,
        max_epochs=1,
        callbacks=[memory],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(LitTransformer(args.tokens, args.steps))
    if trainer.is_global_zero:
        for row in memory.table():
            parts = ", ".join(f"{name} {num_bytes / 1e6:.1f}" for name, num_bytes in row.items() if name != "rank")
            print(f"peak of rank {row['rank']} in MB: {parts}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=2, help="number of processes")
    parser.add_argument("--layout", default="cp2", help="sizes of the mesh's axes rep, dp, cp and tp")
    attentions = ["ring", "ulysses", "ring_ulysses"]
    parser.add_argument("--attention", choices=attentions, default="ring", help="attention of the shards")
    parser.add_argument("--checkpoint", action="store_true", help="recompute the activations of each block")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps")
    args = parser.parse_args()
    if min(args.devices, args.tokens, args.steps) < 1:
        parser.error("--devices, --tokens and --steps take numbers from 1 up.")
    return args


if __name__ == "__main__":
    arguments = parse_arguments()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    warnings.filterwarnings("ignore", ".*treespec.*is deprecated.*")  # Lightning's own use of torch
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    train(arguments)
