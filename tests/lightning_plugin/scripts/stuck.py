"""A run of four ranks, of which two get stuck in step 1. Argument: the directory for flight records.

Rank 1's process is stopped (SIGSTOP), after it has written its record of torch's own flight recorder: torch's analyser
needs one of each rank. Rank 2's main thread sleeps in `stuck_here`.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from lightning_plugin.scripts.plugin_models import Model, loader, trainer
from torch._C import _distributed_c10d as c10d
from torch.distributed.distributed_c10d import _set_pg_timeout

from weft.lightning import HealthMonitor, WeftModelParallelStrategy


class Stuck(Model):
    def on_train_start(self) -> None:
        for group in (dist.group.WORLD, self.trainer.strategy.data_group):
            _set_pg_timeout(timedelta(seconds=8), group)  # starting the ranks may take longer

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if batch_idx == 1 and self.global_rank in (1, 2):
            stuck_here(is_stopped=self.global_rank == 1)
        return super().training_step(batch, batch_idx)


def stuck_here(is_stopped: bool) -> None:
    if is_stopped:
        write_torch_record(Path(sys.argv[1], "torch"))
        os.kill(os.getpid(), signal.SIGSTOP)
    while True:
        time.sleep(1)


def write_torch_record(folder: Path) -> None:
    if hasattr(c10d, "FlightRecorderHook"):  # from torch 2.15 on
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "rank_1").write_bytes(c10d._dump_fr_trace(backend="weft"))


if __name__ == "__main__":
    strategy = WeftModelParallelStrategy(plan="auto", layout="dp4", zero_stage=0)
    run = trainer(4, strategy, sys.argv[1], callbacks=[HealthMonitor(record_dir=sys.argv[1])])
    run.fit(Stuck(), loader())
