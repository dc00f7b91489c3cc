"""Two ranks of Fabric that start a save in the background, and end.

Arguments: the path, and the rank that cannot write, or -1. That rank has another hook for uncaught exceptions.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from lightning.fabric import Fabric
from lightning_plugin.scripts.plugin_models import FeedForward

from weft.lightning.fabric import WeftModelParallelStrategy
from weft.strategy.checkpoint.writing import ChunkWriter


def fail(_: ChunkWriter) -> Any:
    raise OSError("no space left")


if __name__ == "__main__":
    path, failing = Path(sys.argv[1]), int(sys.argv[2])
    fabric = Fabric(accelerator="cpu", devices=2, strategy=WeftModelParallelStrategy(plan="auto", async_save=True))
    fabric.launch()
    if fabric.global_rank == failing:
        ChunkWriter.write = fail
        sys.excepthook = sys.__excepthook__
    model = fabric.setup(FeedForward())
    fabric.save(path, {"model": model, "step": 1})
    print("ended", flush=True)
