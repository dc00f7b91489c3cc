"""An endless run of two ranks with the callback Preemption.

Arguments: its folder, the grace time, and the time that saving takes longer than it needs, in seconds.

Resumes if the folder has a checkpoint. Prints "READY rank pid" in the third step of this run.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from lightning.pytorch import Trainer
from lightning_plugin.scripts.plugin_models import Model, trainer

import weft.lightning


class Slow(Model):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if len(self.losses) == 2:
            os.write(1, f"READY {self.global_rank} {os.getpid()}\n".encode())
        time.sleep(0.02)
        return super().training_step(batch, batch_idx)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    grace, delay = map(float, sys.argv[2:])
    save = Trainer.save_checkpoint
    Trainer.save_checkpoint = lambda *arguments: (time.sleep(delay), save(*arguments))
    preemption = weft.lightning.Preemption(folder, grace_seconds=grace)
    run = trainer(2, "weft", folder, max_steps=100_000, max_epochs=-1, callbacks=[preemption])
    data = torch.ones(4000, 8, dtype=torch.float64)
    run.fit(Slow(), torch.utils.data.DataLoader(data, batch_size=4), ckpt_path=preemption.last_checkpoint())
    print("ended by itself", flush=True)
