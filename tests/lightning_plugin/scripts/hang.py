"""A run of two ranks that does not end by itself. Arguments: the actions of rank 0 and rank 1 in step 1.

compute   multiply matrices endlessly
wait      hang in a collective that the other rank never enters
raise     raise an exception after a second
"""

from __future__ import annotations

import os
import sys
import time

import lightning as L
import torch
import torch.distributed as dist
from torch import nn

import weft.lightning  # noqa: F401  (registers the strategy)


class Model(L.LightningModule):
    def __init__(self, actions: list[str]) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.actions = actions

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if batch_idx == 1:
            self.act(self.actions[self.global_rank])
        return self.layer(batch).square().mean()

    def act(self, action: str) -> None:
        dist.barrier()
        os.write(1, f"READY {self.global_rank} {os.getpid()}\n".encode())
        if action == "wait":
            dist.all_reduce(torch.ones(4))
        elif action == "raise":
            time.sleep(1)
            raise RuntimeError("this rank fails on purpose")
        while True:
            torch.mm(torch.ones(64, 64), torch.ones(64, 64))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="weft",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(sys.argv[1:3]), torch.utils.data.DataLoader(torch.ones(32, 4), batch_size=4, num_workers=1))
