"""A small Mixtral of Hugging Face's transformers: each rank holds some of the experts of every layer.

    pip install transformers
    python examples/15_experts.py                                              # dp2,ep2
    python examples/15_experts.py --devices 1 --layout dp1                     # one device
    python examples/15_experts.py --devices 4 --layout dp4,ep2 --zero-stage 3  # two shards of each expert
    python examples/15_experts.py --devices 4 --layout dp2,ep2,tp2

Prints the losses, which are those of one device for every layout, how evenly the layers route their tokens, and the
experts that each rank holds. The module has no code for sharding: the model is built from its config, and recognised.
On CPU a device is a process with one thread.
"""

from __future__ import annotations

import argparse
import logging
import os
import warnings

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import lightning as L
import torch
import torch.nn.functional as F
from text import Windows, documentation_bytes
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler
from transformers import MixtralConfig, MixtralForCausalLM

from weft.lightning import ExpertMonitor, WeftModelParallelStrategy

SEED, BATCH_SIZE, NUM_TOKENS = 0, 8, 64
CONFIG = MixtralConfig(
    vocab_size=256,
    hidden_size=96,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_local_experts=8,
    num_experts_per_tok=2,
    max_position_embeddings=NUM_TOKENS,
)


class LitMixtral(L.LightningModule):
    """Next-byte prediction, without code for sharding."""

    def __init__(self, num_steps: int) -> None:
        super().__init__()
        self.num_steps = num_steps

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self.model = MixtralForCausalLM(CONFIG)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, targets = batch
        loss = F.cross_entropy(self.model(tokens).logits.flatten(0, 1), targets.flatten())
        self.log("loss", loss, sync_dist=True)  # the mean over data-parallel ranks
        return loss

    def on_train_batch_end(self, *_: object) -> None:
        self.print(f"step {self.global_step}: loss {self.trainer.callback_metrics['loss'].item():.6f}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """Return a loader of windows, which data-parallel ranks divide."""
        replicas = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        windows = Windows(documentation_bytes(), self.num_steps * BATCH_SIZE, NUM_TOKENS, SEED)
        sampler = DistributedSampler(windows, shuffle=False, **replicas)
        return DataLoader(windows, batch_size=BATCH_SIZE // replicas["num_replicas"], sampler=sampler)


def train(args: argparse.Namespace) -> None:
    """Train on this rank; Lightning starts the other ranks' processes with the same command line."""
    L.seed_everything(SEED, verbose=False)
    monitor = ExpertMonitor()
    strategy = WeftModelParallelStrategy(plan="auto", layout=args.layout, zero_stage=args.zero_stage)
    trainer = L.Trainer(
        accelerator="cuda" if torch.cuda.is_available() else "cpu",
        devices=args.devices,
        strategy=strategy,
        max_epochs=1,
        callbacks=[monitor],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    module = LitMixtral(args.steps)
    trainer.fit(module)
    for name, tokens in monitor.table().items():
        balance = max(tokens) * len(tokens) / sum(tokens)
        module.print(f"{name}: tokens of its experts {tokens}, the largest number {balance:.2f} times the mean")
    weight = module.model.model.layers[0].mlp.experts.down_proj
    held = getattr(weight, "_local_tensor", weight).shape[0]
    print(f"rank {trainer.global_rank} holds {held} of {CONFIG.num_local_experts} experts in each layer")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=2, help="number of processes")
    parser.add_argument("--layout", default="dp2,ep2", help="sizes of the mesh's axes, with ep as a part of dp")
    parser.add_argument("--zero-stage", type=int, default=1, choices=range(4), help="what data-parallel ranks shard")
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps")
    args = parser.parse_args()
    if min(args.devices, args.steps) < 1:
        parser.error("--devices and --steps take numbers from 1 up.")
    return args


if __name__ == "__main__":
    arguments = parse_arguments()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    warnings.filterwarnings("ignore", ".*treespec.*is deprecated.*")  # Lightning's own use of torch
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    train(arguments)
