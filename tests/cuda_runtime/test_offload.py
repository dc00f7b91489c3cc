"""`offload` in the Trainer on CUDA devices over NCCL, on the runtime without a device: the results of CPU ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning_plugin.scripts.plugin_models import set_torchrun_environment
from lightning_plugin.test_offload import CASES, DIM, HIDDEN, fit
from ops.on_device import world_on
from torch.optim import Optimizer

from support.ranks import run_on_ranks
from weft._plugin import optimizer_state
from weft._plugin.optimizer_state import load_state
from weft.strategy.data_parallel.local import local_shard

pytestmark = pytest.mark.cuda_runtime

MORE_CASES = {
    "fully sharded": {"layout": "dp2", "zero_stage": 3},
    "tp2 in one file": {"save_distributed_checkpoint": False},
}


def _losses(rank: int, world_size: int, folder: Path, accelerator: str, **options: Any) -> list[float]:
    """Train an epoch, save, and train another one from the checkpoint; return the losses of both."""
    set_torchrun_environment(rank, world_size)
    first, run, optimizer = fit(world_size, folder, accelerator=accelerator, **options)
    _assert_on_cpu(optimizer, "offload" in options)
    run.save_checkpoint(folder / f"{accelerator}.ckpt")
    del run, optimizer
    second, _, optimizer = fit(
        world_size, folder, folder / f"{accelerator}.ckpt", 2, accelerator=accelerator, **options
    )
    _assert_on_cpu(optimizer, "offload" in options)
    return [*first.losses, *second.losses]


def _assert_on_cpu(optimizer: Optimizer, is_offloaded: bool) -> None:
    states = [value for each in optimizer.state.values() for value in each.values()]
    assert states and (not is_offloaded or all(local_shard(value).device.type == "cpu" for value in states))


def _compare(rank: int, world_size: int, folder: Path, options: dict[str, Any], target: str) -> None:
    expected = _losses(rank, world_size, folder, "cpu", **options)
    torch.cuda.set_device(rank)
    moved = mock.patch.object(optimizer_state, "load_state", _without_states_on_the_device)
    with world_on("cpu:weft,cuda:nccl"), moved:
        losses = _losses(rank, world_size, folder, "cuda", **options, offload={"optimizer": target})
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-6)


def _without_states_on_the_device(*arguments: Any) -> None:
    """Load a state, and assert that its parts of a weight's size are not on the device in between."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    load_state(*arguments)
    assert torch.cuda.max_memory_allocated() - before < DIM * HIDDEN


@pytest.mark.parametrize("name", ["tp2", "tp2 in one file", "by rows", "split8", "dp2", "pp2", "fully sharded"])
def test_training_and_resuming_match_cpu_ranks(tmp_path: Path, name: str) -> None:
    target = f"disk:{tmp_path}/states" if name in ("tp2", "split8") else "cpu"
    run_on_ranks(2, _compare, folder=tmp_path, options={**CASES, **MORE_CASES}[name], target=target)
