"""A run of three ranks, of which rank 1 gets stuck in step 1. Arguments: the directory for flight records, and how:

stop    the process is stopped (SIGSTOP)
sleep   its main thread sleeps in `stuck_here`
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from lightning_plugin.scripts.plugin_models import Model, loader, trainer
from torch.distributed.distributed_c10d import _set_pg_timeout

from weft.lightning import HealthMonitor, WeftModelParallelStrategy


class Stuck(Model):
    def on_train_start(self) -> None:
        for group in (dist.group.WORLD, self.trainer.strategy.data_group):
            _set_pg_timeout(timedelta(seconds=3), group)  # starting the ranks may take longer

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if batch_idx == 1 and self.global_rank == 1:
            stuck_here(sys.argv[2])
        return super().training_step(batch, batch_idx)


def stuck_here(how: str) -> None:
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    while True:
        time.sleep(1)


if __name__ == "__main__":
    strategy = WeftModelParallelStrategy(plan="auto", layout="dp3", zero_stage=0)
    run = trainer(3, strategy, sys.argv[1], callbacks=[HealthMonitor(record_dir=sys.argv[1])])
    run.fit(Stuck(), loader())
