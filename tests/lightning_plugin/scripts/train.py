"""A user's script: every Trainer entry point in one process tree; each rank prints a line "RESULT {JSON}".

Arguments: NAMESPACE (lightning.pytorch or pytorch_lightning), devices, folder.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn


def main(namespace: str, devices: int, folder: Path) -> None:
    lightning = importlib.import_module(namespace)
    importlib.import_module("weft.lightning" if namespace == "lightning.pytorch" else "weft.pytorch_lightning")

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.layers = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            loss = (self.layers(batch) - batch).square().mean()
            self.log("loss", loss, sync_dist=True)
            return loss

        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            self.log("val_loss", (self.layers(batch) - batch).square().mean())

        test_step = validation_step

        def predict_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.layers(batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    data = torch.randn(32, 8, generator=torch.Generator().manual_seed(3))
    loader = torch.utils.data.DataLoader(data, batch_size=8, num_workers=1)
    options = {"accelerator": "cpu", "devices": devices, "strategy": "weft", "enable_progress_bar": False}
    logger = importlib.import_module(f"{namespace}.loggers").CSVLogger(folder)
    arguments = {"max_epochs": 2, "default_root_dir": folder, "gradient_clip_val": 0.1, "logger": logger}
    trainer = lightning.Trainer(**options, **arguments)
    model = Model()
    trainer.fit(model, loader, loader)
    tested = trainer.test(model, loader, verbose=False)
    predicted = torch.cat(trainer.predict(model, loader))
    trainer.fit_loop.max_epochs = 3
    trainer.fit(model, loader, loader)
    trainer.save_checkpoint(folder / "after.ckpt")
    other_count = ""
    if devices > 1:
        try:
            lightning.Trainer(**{**options, "devices": devices + 1})
        except ValueError as error:
            other_count = str(error)
    result = {
        "rank": trainer.global_rank,
        "world_size": trainer.world_size,
        "steps": trainer.global_step,
        "tested": tested[0]["val_loss"],
        "predicted": predicted.sum().item(),
        "weight": sum(p.full_tensor().abs().sum().item() for p in model.parameters()),
        "local_shape": list(model.layers[0].weight.to_local().shape),
        "group_alive": dist.is_initialized(),
        "other_count": other_count,
    }
    # A single write, so that the lines of ranks that share a pipe do not interleave: torchrun starts them unbuffered.
    os.write(sys.stdout.fileno(), f"RESULT {json.dumps(result)}\n".encode())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
