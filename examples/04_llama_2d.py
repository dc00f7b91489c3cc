"""A Llama, tiny or with the shapes of 7B, on a 2-D mesh: fully sharded over one axis, tensor-parallel over the other.

    python examples/04_llama_2d.py                                           # tiny, dp2,tp2, on 4 processes
    python examples/04_llama_2d.py --save /tmp/llama                         # writes a checkpoint, too
    python examples/04_llama_2d.py --resume /tmp/llama --epochs 2 --devices 2 --layout tp2
    python examples/04_llama_2d.py --size 7b --devices 8 --layout dp2,tp4 --precision bf16-true   # on 8 GPUs

Prints the plan's report, the losses, tokens per second and the peak memory of each rank. The model is built in
`configure_model`, so that each rank materializes only its shards; the loss is computed from sharded logits. On CPU a
device is a process with one thread.
"""

from __future__ import annotations

import argparse
import os
import warnings

import lightning as L
import torch
import torch.nn.functional as F
from model import ModelArgs, Transformer
from text import Windows, documentation_bytes
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

import weft.strategy
from weft.lightning import MemoryMonitor, ThroughputMonitor, WeftModelParallelStrategy

SEED, SEQ_LEN, BATCH_SIZE = 0, 128, 8
SIZES = {
    "tiny": ModelArgs(dim=128, n_layers=4, n_heads=4, hidden_dim=384, vocab_size=512, max_seq_len=SEQ_LEN),
    "7b": ModelArgs(dim=4096, n_layers=32, n_heads=32, hidden_dim=11008, vocab_size=32000, max_seq_len=4096),
}
PLAN = {
    "model.tok_embeddings": "vocab_embedding",
    "model.layers.*.attention": "attention",
    "model.layers.*.feed_forward": "column_row_mlp",
    "model.output": "vocab_head",
}


class LitLlama(L.LightningModule):
    """Next-byte prediction, without code for sharding."""

    def __init__(self, args: ModelArgs, num_steps: int) -> None:
        super().__init__()
        self.args, self.num_steps = args, num_steps

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self.model = Transformer(self.args)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, targets = batch
        loss = F.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())
        self.log("loss", loss, sync_dist=True)  # the mean over data-parallel ranks
        return loss

    def on_train_batch_end(self, *_: object) -> None:
        self.print(f"step {self.global_step}: loss {self.trainer.callback_metrics['loss'].item():.6f}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3 * 128 / self.args.dim, betas=(0.9, 0.95))

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """Return a loader of this rank's windows: the data-parallel ranks divide the windows of each step."""
        replicas = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        num_replicas = replicas["num_replicas"]
        if BATCH_SIZE % num_replicas:
            raise ValueError(
                f"{num_replicas} data-parallel ranks do not divide a batch of {BATCH_SIZE}; choose another --layout."
            )
        seed = SEED + self.trainer.current_epoch
        windows = Windows(documentation_bytes(), self.num_steps * BATCH_SIZE, SEQ_LEN, seed)
        # Without this sampler and with several data-parallel ranks, Lightning would add a shuffling one.
        sampler = DistributedSampler(windows, shuffle=False, **replicas)
        return DataLoader(windows, batch_size=BATCH_SIZE // num_replicas, sampler=sampler)


def memory_table(rows: list[dict[str, int]]) -> str:
    """Return a table of each rank's peak bytes by category, in MB."""
    names = [name for name in rows[0] if name != "rank"]
    lines = [["rank", *names]]
    lines += [[str(row["rank"]), *(f"{row[name] / 1e6:.2f}" for name in names)] for row in rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def train(args: argparse.Namespace) -> None:
    """Train on this rank; Lightning starts the other ranks' processes with the same command line."""
    L.seed_everything(SEED, verbose=False)
    module = LitLlama(SIZES[args.size], args.steps)
    memory = MemoryMonitor()
    trainer = L.Trainer(
        accelerator="cuda" if torch.cuda.is_available() else "cpu",
        devices=args.devices,
        strategy=WeftModelParallelStrategy(
            plan=PLAN,
            layout=args.layout,
            zero_stage=args.zero_stage,
            sequence_parallel=args.sequence_parallel,
            save_distributed_checkpoint=True,
        ),
        precision=args.precision,
        gradient_clip_val=1.0,
        max_epochs=args.epochs,
        reload_dataloaders_every_n_epochs=1,
        log_every_n_steps=args.steps,
        callbacks=[memory, ThroughputMonitor(length_fn=lambda batch: batch[0].numel())],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, ckpt_path=args.resume)
    if args.save is not None:
        trainer.save_checkpoint(args.save)
    if trainer.is_global_zero:
        print(weft.strategy.report(module))
        print("\npeak memory of each rank, in MB\n" + memory_table(memory.table()))
        print(f"\n{trainer.callback_metrics['throughput/tokens_per_second'].item():,.0f} tokens per second")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="tiny", help="size of the model")
    parser.add_argument("--devices", type=int, default=4, help="number of processes")
    parser.add_argument("--layout", default="dp2,tp2", help="sizes of the mesh's axes rep, dp and tp")
    parser.add_argument("--zero-stage", type=int, default=3, help="what is sharded over dp: from 0, nothing, to 3, all")
    parser.add_argument("--sequence-parallel", action="store_true", help="shard activations between the layers, too")
    parser.add_argument("--precision", default="32-true", help="precision of Lightning's Trainer")
    parser.add_argument("--steps", type=int, default=10, help="steps per epoch")
    parser.add_argument("--epochs", type=int, default=1, help="epochs, including those before --resume")
    parser.add_argument("--save", help="write a checkpoint to this directory at the end")
    parser.add_argument("--resume", help="resume from this checkpoint, which may be of another layout")
    args = parser.parse_args()
    if min(args.devices, args.steps, args.epochs) < 1:
        parser.error("--devices, --steps and --epochs take numbers from 1 up.")
    return args


if __name__ == "__main__":
    arguments = parse_arguments()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    warnings.filterwarnings("ignore", ".*treespec.*is deprecated.*")  # Lightning's own use of torch
    train(arguments)
