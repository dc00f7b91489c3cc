"""Errors of the Trainer with a model in stages, raised on every rank that can detect them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning_plugin.scripts.pipeline_models import Text, pipeline_strategy, text_loader
from lightning_plugin.scripts.plugin_models import set_torchrun_environment, trainer
from torch import Tensor, nn

from support.rank_pool import RankFailure
from support.ranks import on_ranks, run_on_ranks
from weft.lightning import WeftModelParallelStrategy
from weft.strategy.pipeline import AutoCuts


class FaultyText(Text):
    """`kind` selects the error in its steps."""

    def __init__(self, kind: str) -> None:
        super().__init__(has_head=kind in ("module before", "parameter before"))
        self.kind = kind
        self.automatic_optimization = kind != "manual"
        if kind == "tied":
            self.head = nn.Linear(1, 1)
            self.head.weight = self.model.layers[0].attention.wq.weight

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        if self.kind == "module before":
            self.head(torch.ones(1, 37, dtype=torch.float64))
        if self.kind == "parameter before":
            batch["x"] = batch["x"] * (self.temperature > 0)
        if self.kind == "twice":
            self.model(batch["x"])
        if self.kind == "never":
            return torch.ones((), requires_grad=True)
        loss, logits = self.loss(batch)
        if self.kind == "group":
            self.log("a", loss, sync_dist_group="x")
        if self.kind == "outputs":
            return {"loss": loss, "hidden": logits.transpose(0, 1)}
        if self.kind == "optimizer":
            return loss
        return None if self.kind == "nothing" else loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        if self.kind == "validation":
            raise KeyError("no such label")

    def configure_optimizers(self) -> Any:
        if self.kind == "optimizer":
            self.model.layers[0].attention.wq.weight.mean()
            self.model.layers[2].attention.wq.weight.mean()
        return super().configure_optimizers()


class IteratorText(Text):
    def training_step(self, dataloader_iter: Any) -> Any:
        return self.loss(next(dataloader_iter)[0])[0]


ERRORS_ON_ALL_RANKS = {
    "manual": (ValueError, "FaultyText optimizes manually, and the schedule decides"),
    "module before": (
        RuntimeError,
        "'head.*' is outside of 'model' and therefore only on the last stage; use it in a step",
    ),
    "parameter before": (RuntimeError, "'temperature' is outside of 'model' and therefore only on the last stage"),
    "never": (RuntimeError, "called the model in stages 0 times for a micro-batch; call it once"),
    "outputs": (TypeError, "a tensor of shape .* for each micro-batch, which cannot be joined"),
    "tied": (ValueError, "'head.weight' and 'model.layers.0.attention.wq.weight' are one parameter"),
    "optimizer": (AttributeError, "the layer 'layers.[02]' .* is on stage [01], and its 'attention' was read"),
}
ERRORS_ON_LAST_STAGE = {
    "twice": (RuntimeError, "the step calls the model in stages twice for one micro-batch; call it once"),
    "group": (ValueError, "got a sync_dist_group, which ranks of other stages do not have"),
    "nothing": (TypeError, "training_step returned a NoneType for a micro-batch"),
    "validation": (KeyError, "no such label"),
}


@on_ranks(2)
@pytest.mark.parametrize("kind", ERRORS_ON_ALL_RANKS)
def test_errors_are_raised_on_all_ranks(rank: int, world_size: int, tmp_path: Path, kind: str) -> None:
    set_torchrun_environment(rank, world_size)
    error, message = ERRORS_ON_ALL_RANKS[kind]
    with pytest.raises(error, match=message):
        trainer(world_size, pipeline_strategy(), tmp_path).fit(FaultyText(kind), text_loader())


@pytest.mark.parametrize("kind", ERRORS_ON_LAST_STAGE)
def test_errors_on_last_stage_are_quoted_on_first(tmp_path: Path, kind: str) -> None:
    error, message = ERRORS_ON_LAST_STAGE[kind]
    with pytest.raises(RankFailure) as failure:
        run_on_ranks(2, fit_faulty, kind=kind, folder=str(tmp_path))
    _, *reports = re.split(r"^rank (?=[01] of 2 failed)", str(failure.value), flags=re.MULTILINE)
    assert len(reports) == 2, str(failure.value)
    first_stage, last_stage = sorted(reports)  # either may reach its handler first
    assert re.search(f"{error.__name__}: .*{message}", last_stage)
    assert re.search(f"PeerLostError: rank 1 left .* step: {error.__name__}: .*{message}", first_stage)


def fit_faulty(rank: int, world_size: int, kind: str, folder: str) -> None:
    set_torchrun_environment(rank, world_size)
    try:
        run = trainer(world_size, pipeline_strategy(), folder)
        (run.validate if kind == "validation" else run.fit)(FaultyText(kind), text_loader())
    except Exception:
        if rank == 1:  # as the exit of its process does
            dist.group.WORLD._get_backend(torch.device("cpu")).shutdown()
        raise


@on_ranks(2)
def test_iterator_and_unknown_name_raise(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    with pytest.raises(ValueError, match=r"IteratorText\.training_step takes a dataloader_iter"):
        trainer(world_size, pipeline_strategy(), tmp_path).fit(IteratorText(), text_loader())
    with pytest.raises(ValueError, match=r"='net', which Text does not have; name one of its modules: 'model', 'acc"):
        trainer(world_size, pipeline_strategy(pipeline_module="net"), tmp_path).fit(Text(), text_loader())
    with pytest.raises(
        ValueError, match=r"'layer\.2', which is not a module of the model; the nearest name is 'layers\.2'"
    ):
        trainer(world_size, pipeline_strategy(pipeline_cuts=["model.layer.2"]), tmp_path).fit(Text(), text_loader())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"layout": "pp2"}, ValueError, "2 pipeline-parallel ranks without stages"),
        (
            {"pipeline_cuts": ["a"], "pipeline_module": "model"},
            ValueError,
            "1 pipeline_cuts make 2 stages for one pipeline-parallel rank; pass pipeline_parallel_size=2, or a layout",
        ),
        ({"pipeline_module": "model"}, ValueError, "got pipeline_module without stages"),
        ({"split_batch": torch.chunk}, ValueError, "got split_batch without stages"),
        ({"micro_batch_shares": [1, 2]}, ValueError, "got micro_batch_shares without stages"),
        (
            {"pipeline_cuts": [], "pipeline_module": "model", "micro_batch_shares": [1, 2], "split_batch": torch.chunk},
            ValueError,
            "micro_batch_shares and split_batch, which sets the sizes itself; leave one out",
        ),
        (
            {"pipeline_cuts": [], "pipeline_module": "model", "micro_batch_shares": [1, -2]},
            ValueError,
            r"micro_batch_shares is \[1, -2\]; pass numbers above 0",
        ),
        (
            {"pipeline_cuts": [], "pipeline_module": "model", "num_micro_batches": 0},
            ValueError,
            "num_micro_batches is 0; pass a whole number",
        ),
        ({"pipeline_cuts": [], "pipeline_module": 3}, TypeError, "pipeline_module=3; pass the name of the divided"),
        ({"pipeline_cuts": "layers.2"}, TypeError, "pipeline_cuts='layers.2'; pass a list of module names, or 'auto'"),
        (
            {"pipeline_cuts": "auto"},
            ValueError,
            "pipeline_cuts='auto' for one pipeline-parallel rank; pass pipeline_par",
        ),
        (
            {"pipeline_cuts": AutoCuts(stages_per_rank=2), "layout": "pp2"},
            ValueError,
            "WeftModelParallelStrategy: .*1f1b.* one stage",
        ),
        (
            {"pipeline_cuts": AutoCuts(stages_per_rank=3), "layout": "pp2", "pipeline_schedule": "v_min"},
            ValueError,
            "WeftModelParallelStrategy: schedule 'v_min' has two stages on each rank and got 3; cut the model into two",
        ),
        (
            {"pipeline_cuts": ["a"], "layout": "pp2", "pipeline_schedule": "zbv"},
            ValueError,
            "WeftModelParallelStrategy: schedule 'zbv' has two stages on each rank and got 1; cut the model into two",
        ),
        (
            {"pipeline_cuts": ["a", "b", "c"], "layout": "pp2", "pipeline_schedule": "zero_bubble"},
            ValueError,
            "WeftModelParallelStrategy: schedule 'zero_bubble' has one stage on each rank and got 2; use 'interleaved'",
        ),
        (
            {"pipeline_cuts": "auto", "layout": "pp2", "pipeline_schedule": "2f2b"},
            ValueError,
            "got pipeline_schedule='2f2b'",
        ),
        (
            {"pipeline_cuts": [], "pipeline_module": "model", "micro_batch_weight": 3},
            TypeError,
            "micro_batch_weight=3, which cannot be called",
        ),
        (
            {"pipeline_cuts": [], "pipeline_module": "model", "save_distributed_checkpoint": False},
            ValueError,
            "save_distributed_checkpoint=False with pipeline_cuts",
        ),
    ],
)
def test_invalid_settings_raise(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        WeftModelParallelStrategy(**options)
