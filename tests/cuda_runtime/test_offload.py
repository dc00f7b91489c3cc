"""`offload` in the Trainer on CUDA devices over NCCL, on the runtime without a device: the results of CPU ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_plugin.scripts.plugin_models import set_torchrun_environment
from lightning_plugin.test_offload import CASES, fit
from ops.on_device import world_on

from support.ranks import run_on_ranks
from weft.strategy.data_parallel.local import local_shard

pytestmark = pytest.mark.cuda_runtime

FULLY_SHARDED = {"layout": "dp2", "zero_stage": 3}


def _losses(rank: int, world_size: int, folder: Path, accelerator: str, **options: Any) -> list[float]:
    """Train an epoch, save, and train another one from the checkpoint; return the losses of both."""
    set_torchrun_environment(rank, world_size)
    first, run, optimizer = fit(world_size, folder, accelerator=accelerator, **options)
    if "offload" in options:
        states = [value for each in optimizer.state.values() for value in each.values()]
        assert states and all(local_shard(value).device.type == "cpu" for value in states)
    run.save_checkpoint(folder / f"{accelerator}.ckpt")
    second, *_ = fit(world_size, folder, folder / f"{accelerator}.ckpt", 2, accelerator=accelerator, **options)
    return [*first.losses, *second.losses]


def _compare(rank: int, world_size: int, folder: Path, options: dict[str, Any], target: str) -> None:
    expected = _losses(rank, world_size, folder, "cpu", **options)
    torch.cuda.set_device(rank)
    with world_on("cpu:weft,cuda:nccl"):
        losses = _losses(rank, world_size, folder, "cuda", **options, offload={"optimizer": target})
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["tp2", "by rows", "split8", "dp2", "pp2", "fully sharded"])
def test_training_and_resuming_match_cpu_ranks(tmp_path: Path, name: str) -> None:
    target = f"disk:{tmp_path}/states" if name in ("tp2", "split8") else "cpu"
    run_on_ranks(2, _compare, folder=tmp_path, options=CASES.get(name, FULLY_SHARDED), target=target)
