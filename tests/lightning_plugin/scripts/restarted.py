"""A training of two ranks that goes on from its newest checkpoint, and writes its weights at the end.

Arguments: the folder, the number of steps, and those after which a rank kills itself in the first run, as "rank:step".
With "save", rank 0 kills itself in the second run, after rank 1 has reported its file of the second save; in the third
run, rank 1 writes that save late. Each second step is saved in the background. Prints "READY rank pid" before its first
step.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_plugin.scripts.plugin_models import Model, ResumableLoader, trainer, weights

import weft.lightning
from weft.strategy.checkpoint import background


class Killed(Model):
    """Kills its process in the middle of a step; draws random numbers in each."""

    kills: frozenset[str] = frozenset()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if not self.losses:
            os.write(1, f"READY {self.global_rank} {os.getpid()}\n".encode())
        loss = super().training_step(batch, batch_idx)
        if f"{self.global_rank}:{self.trainer.global_step}" in self.kills:
            os.kill(os.getpid(), signal.SIGKILL)
        return loss


def _kill_in_second_save(restart: str) -> None:
    reports, write = background._Save._reports, background._Save._write

    def killed(save: Any) -> Any:
        while background._process.num_saves == 2 and not save._store.check(["1"]):
            time.sleep(0.01)
        if background._process.num_saves == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return reports(save)

    def late(save: Any) -> None:
        time.sleep(1.0 if save._rank == 1 and background._process.num_saves == 2 else 0.0)
        write(save)

    if restart == "1":
        background._Save._reports = killed
    if restart == "2":
        background._Save._write = late


if __name__ == "__main__":
    folder, num_steps = Path(sys.argv[1]), int(sys.argv[2])
    model = Killed(dropout=0.5)
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if restart == "0":
        model.kills = frozenset(sys.argv[3:])
    if "save" in sys.argv[3:]:
        _kill_in_second_save(restart)
    save = ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=1)
    strategy = weft.lightning.WeftModelParallelStrategy(plan="auto", async_save=True, resume="auto")
    run = trainer(2, strategy, folder, max_epochs=-1, max_steps=num_steps, callbacks=[save], enable_checkpointing=True)
    run.fit(model, ResumableLoader())
    result = weights(model)
    if run.is_global_zero:
        torch.save(result, folder / "weights.pt")
