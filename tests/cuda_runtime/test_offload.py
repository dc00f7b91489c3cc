"""`offload` in the Trainer on CUDA devices over NCCL, on the runtime without a device: the results of CPU ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning_plugin.scripts.plugin_models import set_torchrun_environment
from lightning_plugin.test_offload import CASES, DIM, HIDDEN, fit, train_by_fabric
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
    "16-mixed": {"layout": "dp2", "scales": True},
}


def _losses(rank: int, world_size: int, folder: Path, accelerator: str, **options: Any) -> list[float]:
    """Train an epoch, save, and train another one from the checkpoint; return the losses of both."""
    set_torchrun_environment(rank, world_size)
    trainer_options = {"accelerator": accelerator, **options.pop("trainer_options", {})}
    if options.pop("scales", False):
        scaler = MixedPrecision("16-mixed", accelerator, torch.amp.GradScaler(accelerator, init_scale=2.0**22))
        trainer_options |= {"plugins": scaler, "precision": None}
    first, run, optimizer = fit(world_size, folder, trainer_options=trainer_options, **options)
    _assert_on_cpu(optimizer, options.get("offload", {}))
    if "plugins" in trainer_options:
        assert trainer_options["plugins"].scaler.get_scale() < 2.0**22  # some gradients overflowed
    path = folder / f"{accelerator}.ckpt"
    run.save_checkpoint(path)
    del run, optimizer
    second, _, optimizer = fit(world_size, folder, path, 2, trainer_options=trainer_options, **options)
    _assert_on_cpu(optimizer, options.get("offload", {}))
    return [*first.losses, *second.losses]


def _assert_on_cpu(optimizer: Optimizer, offload: dict[str, str]) -> None:
    states = [value for each in optimizer.state.values() for value in each.values()]
    assert states and (not offload or all(local_shard(value).device.type == "cpu" for value in states))
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert "parameters" not in offload or all(local_shard(p).device.type == "cpu" for p in parameters)


def _compare(rank: int, world_size: int, folder: Path, options: dict[str, Any], offload: dict[str, str]) -> None:
    expected = _losses(rank, world_size, folder, "cpu", **options)
    torch.cuda.set_device(rank)
    moved = mock.patch.object(optimizer_state, "load_state", _without_states_on_the_device)
    # As StrategyMixin._get_process_group_backend chooses.
    has_cpu_backend = "pipeline_cuts" in options or "parameters" in offload
    with world_on("cpu:weft,cuda:nccl" if has_cpu_backend else "cuda:nccl"), moved:
        losses = _losses(rank, world_size, folder, "cuda", **options, offload=offload)
    is_half = options.get("scales") or options.get("trainer_options", {}).get("precision") == "bf16-true"
    torch.testing.assert_close(losses, expected, rtol=1e-2 if is_half else 1e-4, atol=1e-6)


def _without_states_on_the_device(*arguments: Any) -> None:
    """Load a state, and assert that its parts of a weight's size are not on the device in between."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    load_state(*arguments)
    assert torch.cuda.max_memory_allocated() - before < DIM * HIDDEN


@pytest.mark.parametrize(
    "name", ["tp2", "tp2 in one file", "by rows", "split8", "dp2", "pp2", "fully sharded", "16-mixed"]
)
def test_training_and_resuming_match_cpu_ranks(tmp_path: Path, name: str) -> None:
    target = f"disk:{tmp_path}/states" if name in ("tp2", "split8") else "cpu"
    options = {**CASES, **MORE_CASES}[name]
    run_on_ranks(2, _compare, folder=tmp_path, options=options, offload={"optimizer": target})


PARAMETER_CASES: dict[str, dict[str, Any]] = {
    "states on a disk": {},
    "in the backward": {"optimizer_in_backward": True},
    "split8": {"optimizer_state": "int8", "master_weights": "split8"},
    "in one file": {"save_distributed_checkpoint": False},
    "clipped": {"trainer_options": {"gradient_clip_val": 0.01, "accumulate_grad_batches": 2}},
    "clipped in the backward": {"trainer_options": {"gradient_clip_val": 0.01}, "optimizer_in_backward": True},
    "16-mixed": {"scales": True},
    "bf16-true": {"trainer_options": {"precision": "bf16-true"}},
}


@pytest.mark.parametrize("name", PARAMETER_CASES)
def test_offloaded_parameters_match_cpu_ranks(tmp_path: Path, name: str) -> None:
    offload = {"parameters": "cpu"} | ({"optimizer": f"disk:{tmp_path}/states"} if name == "states on a disk" else {})
    run_on_ranks(2, _compare, folder=tmp_path, options={"layout": "dp2", **PARAMETER_CASES[name]}, offload=offload)


def _compare_by_fabric(rank: int, world_size: int) -> None:
    set_torchrun_environment(rank, world_size)
    expected = train_by_fabric("cpu", plan="auto", layout="dp2")
    torch.cuda.set_device(rank)
    with world_on("cpu:weft,cuda:nccl"):
        for offload in ({"optimizer": "cpu"}, {"parameters": "cpu"}):
            shards = train_by_fabric("cuda", plan="auto", layout="dp2", offload=offload)
            assert all((shard.device.type == "cpu") == ("parameters" in offload) for shard in shards)
            torch.testing.assert_close([shard.cpu() for shard in shards], expected, rtol=1e-4, atol=1e-6)


def test_fabric_matches_cpu_ranks() -> None:
    run_on_ranks(2, _compare_by_fabric)
