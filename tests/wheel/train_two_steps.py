"""A user's script: two steps of Trainer(strategy="weft") on two CPU ranks; each rank prints a line RESULT {json}."""

from __future__ import annotations

import json
import os
import sys

import lightning as L
import torch
from torch import Tensor, nn

import weft.lightning


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)).double()
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = (self.layers(batch) - batch).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def main() -> None:
    data = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="weft",
        max_epochs=1,
        logger=False,
        use_distributed_sampler=False,
        **quiet,
    )
    model = Model()
    trainer.fit(model, loader)
    result = {
        "rank": trainer.global_rank,
        "steps": trainer.global_step,
        "losses": model.losses,
        "local_shape": list(model.layers[0].weight.to_local().shape),
        "weft": weft.__file__,
        "plugin": weft.lightning.__file__,
    }
    # One write: the ranks share a pipe, and lines must not interleave.
    os.write(sys.stdout.fileno(), f"RESULT {json.dumps(result)}\n".encode())


if __name__ == "__main__":
    main()
