"""A user's script with a LightningCLI; each rank prints its mesh and weights as a line "RESULT {JSON}"."""

from __future__ import annotations

import json
import os
import sys

import lightning as L
import torch
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn

import weft.lightning


class Model(L.LightningModule):
    """An MLP named "layers", the name that the tests' plans match."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, 8))
        self.start = self.layers[0].weight.detach().clone()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.layers(batch) - batch).square().mean()


class Data(L.LightningDataModule):
    """16 rows, trained in 4 steps on any number of data-parallel ranks."""

    def train_dataloader(self) -> torch.utils.data.DataLoader:
        rows = torch.randn(16, 8, generator=torch.Generator().manual_seed(3))
        ranks = self.trainer.distributed_sampler_kwargs
        # Lightning's default sampler shuffles if there are several replicas, and keeps the order if there is one.
        sampler = torch.utils.data.DistributedSampler(rows, shuffle=False, **ranks)
        return torch.utils.data.DataLoader(rows, 4 // ranks["num_replicas"], sampler=sampler)


def rules(name: str, module: nn.Module) -> str | None:
    """Return the style of a module; the configuration names this function as its plan."""
    return "column_row_mlp" if name == "layers" else None


def main() -> None:
    cli = LightningCLI(Model, Data)
    strategy = cli.trainer.strategy
    assert type(strategy) is weft.lightning.WeftModelParallelStrategy
    weights = [p.full_tensor() for p in cli.model.parameters()]
    result = {
        "rank": cli.trainer.global_rank,
        "steps": cli.trainer.global_step,
        "mesh": list(strategy.device_mesh.shape),
        "local_shape": list(cli.model.layers[0].weight.to_local().shape),
        "moved": (weights[0] - cli.model.start).abs().max().item(),
        "weights": [weight.flatten().tolist() for weight in weights],
    }
    # A single write, so that the lines of ranks that share a pipe do not interleave.
    os.write(sys.stdout.fileno(), f"RESULT {json.dumps(result)}\n".encode())


if __name__ == "__main__":
    main()
