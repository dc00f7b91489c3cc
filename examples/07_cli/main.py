"""The small language model under LightningCLI: a YAML file, not this script, determines the sharding.

    python examples/07_cli/main.py fit --config examples/07_cli/devices_4.yaml
    python examples/07_cli/main.py fit --config examples/07_cli/devices_4.yaml --trainer.strategy.zero_stage 1

The files for 1, 2, 4 and 8 devices differ only in `devices` and `layout`, and give the same losses: `batch_size` counts
the windows of a step on all ranks, and the data-parallel ranks divide them. The script needs `pip install weft[cli]`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.cli import LightningCLI, OptimizerCallable
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

sys.path.append(str(Path(__file__).resolve().parents[1]))
from model import ModelArgs, Transformer
from text import Windows, documentation_bytes


class LitTransformer(L.LightningModule):
    """Next-byte prediction. The model is built in `configure_model`, so that each rank materializes only its shards."""

    def __init__(self, args: ModelArgs, optimizer: OptimizerCallable = torch.optim.AdamW) -> None:
        super().__init__()
        self.args, self.optimizer = args, optimizer

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self.model = Transformer(self.args)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, targets = batch
        loss = F.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.parameters())  # the CLI would build the optimizer before sharding

    def on_train_end(self) -> None:
        parameters = list(self.parameters())
        local = sum(getattr(parameter, "_local_tensor", parameter).numel() for parameter in parameters)
        self.print(
            f"devices {self.trainer.world_size}: {local} of {sum(p.numel() for p in parameters)} parameters on rank 0, "
            f"loss {self.trainer.callback_metrics['loss'].item():.6f}"
        )


class Documentation(L.LightningDataModule):
    """Random windows of Python's documentation.

    Args:
        num_steps: steps per epoch.
        batch_size: windows per step, over all ranks.
        seq_len: bytes per window; at most the model's max_seq_len.
    """

    def __init__(self, num_steps: int = 200, batch_size: int = 16, seq_len: int = 128) -> None:
        super().__init__()
        self.num_steps, self.batch_size, self.seq_len = num_steps, batch_size, seq_len

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        replicas = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        num_replicas = replicas["num_replicas"]
        if self.batch_size % num_replicas:
            raise ValueError(
                f"Documentation: got batch_size={self.batch_size} for {num_replicas} data-parallel ranks; "
                "choose a multiple of their number."
            )
        windows = Windows(documentation_bytes(), self.num_steps * self.batch_size, self.seq_len, seed=0)
        # Without this sampler and with several data-parallel ranks, Lightning would add a shuffling one.
        sampler = DistributedSampler(windows, shuffle=False, **replicas)
        return DataLoader(windows, batch_size=self.batch_size // num_replicas, sampler=sampler)


if __name__ == "__main__":
    # Do not save the configuration that was read from the YAML file and the command line.
    LightningCLI(LitTransformer, Documentation, save_config_callback=None)
