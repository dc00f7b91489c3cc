"""affinity="auto": during a run, each rank runs on its share of the processors."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning_plugin.scripts.plugin_models import set_torchrun_environment, trainer

from support.ranks import on_ranks
from weft.lightning import WeftModelParallelStrategy
from weft.lightning.fabric import WeftModelParallelStrategy as FabricStrategy
from weft.strategy.affinity import run_on

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")


class Model(pl.LightningModule):
    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.fails = fails
        self.processors: set[int] = set()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.processors = os.sched_getaffinity(0)
        if self.fails:
            raise ArithmeticError("a step that fails")
        return self.layer(batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _of_ranks(processors: set[int]) -> list[frozenset[int]]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, frozenset(processors))
    return gathered


@on_ranks(2, keeps_groups=True)
def test_trainer_spreads_ranks_until_the_run_ends(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    before = frozenset(os.sched_getaffinity(0))
    loader = torch.utils.data.DataLoader(torch.ones(2, 4))
    for options, fails in (({}, False), ({"affinity": "auto"}, False), ({"affinity": "auto"}, True)):
        model = Model(fails)
        run = trainer(world_size, WeftModelParallelStrategy(plan="auto", layout="dp2", **options), tmp_path)
        if fails:
            with pytest.raises(ArithmeticError, match="a step that fails"):
                run.fit(model, loader)
        else:
            run.fit(model, loader)
        first, second = _of_ranks(model.processors)
        if options:
            assert first | second == before and not first & second
        else:
            assert first == second == before
        assert frozenset(os.sched_getaffinity(0)) == before


@on_ranks(2, keeps_groups=True)
def test_fabric_spreads_ranks(rank: int, world_size: int) -> None:
    set_torchrun_environment(rank, world_size)
    before = frozenset(os.sched_getaffinity(0))
    try:
        Fabric(accelerator="cpu", devices=world_size, strategy=FabricStrategy(plan="auto", affinity="auto")).launch()
        first, second = _of_ranks(os.sched_getaffinity(0))
        assert first | second == before and not first & second
    finally:
        run_on(before)
