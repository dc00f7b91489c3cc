"""Optimizers that compute with full matrices, such as torch's Muon, step sharded parameters as on one device."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from lightning_plugin.scripts.plugin_models import (
    BATCH,
    NUM_BATCHES,
    FeedForward,
    assert_same_weights,
    fixed_data,
    loader,
    set_torchrun_environment,
    trainer,
    weights,
)
from torch import Tensor
from torch.utils.data import DataLoader

from support.ranks import on_ranks, run_on_ranks
from weft.lightning import WeftModelParallelStrategy


class Matrices(L.LightningModule):
    def __init__(self, optimizer: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = FeedForward()
        self.optimizer = optimizer

    def training_step(self, batch: Tensor) -> Tensor:
        return (self.model(batch) - batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer == "Muon":
            return torch.optim.Muon(self.parameters(), lr=0.2)
        return torch.optim.Adafactor(self.parameters(), lr=0.02)


def fit(rank: int, world_size: int, folder: str, optimizer: str, options: dict[str, Any]) -> dict[str, Tensor]:
    """Every data-parallel rank gets the same batches, whose average gradient is that of one device."""
    set_torchrun_environment(rank, world_size)
    model = Matrices(optimizer)
    strategy = WeftModelParallelStrategy(plan="auto", **options)
    # Muon's sums in bfloat16 depend on the shards, so its second step would begin from other weights. The gradient of
    # all samples has full rank; Muon would enlarge the rounding errors in missing directions.
    batches = DataLoader(fixed_data(), batch_size=BATCH * NUM_BATCHES) if optimizer == "Muon" else loader()
    trainer(world_size, strategy, folder).fit(model, batches)
    return weights(model)


@pytest.mark.parametrize("optimizer", ["Muon", "Adafactor"])
def test_matches_one_device(tmp_path: Any, optimizer: str) -> None:
    case = {"folder": str(tmp_path), "optimizer": optimizer}
    [expected] = run_on_ranks(1, fit, options={}, **case)
    layouts: list[dict[str, Any]] = [{"layout": "tp2"}, {"layout": "dp2"}, {"layout": "dp2", "zero_stage": 0}]
    for options in layouts:
        for found in run_on_ranks(2, fit, options=options, **case):
            if optimizer == "Adafactor":
                assert_same_weights(found, expected, rtol=1e-9)
                continue
            for name, parameter in Matrices("Muon").named_parameters():
                change = (expected[name] - parameter).norm()
                # Rounding to bfloat16 makes 0.03; shards that are orthogonalized one by one make 0.7.
                assert (found[name] - expected[name]).norm() < 0.1 * change, (options, name)


@on_ranks(2)
@pytest.mark.parametrize("optimizer", ["Muon", "Adafactor"])
def test_shards_of_parameters_raise(rank: int, world_size: int, tmp_path: Any, optimizer: str) -> None:
    with pytest.raises(ValueError, match=f"{optimizer}"):
        fit(rank, world_size, str(tmp_path), optimizer, {"layout": "dp2", "zero_stage": 1})
