"""Expert-parallel ranks under the Trainer and Fabric: models with experts train like on one device."""

from __future__ import annotations

import functools
import re
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning_plugin.scripts.plugin_models import assert_same_weights, set_torchrun_environment, trainer, weights
from torch import Tensor
from torch.utils.data import DataLoader

from support.hugging_face import EXPERT_CONFIGS, VOCAB, language_model
from support.ranks import run_on_ranks
from weft.lightning import WeftModelParallelStrategy

OTHER_FAMILIES = [family for family in EXPERT_CONFIGS if family != "mixtral"]
ROWS, TOKENS, STEPS = 4, 9, 10
# Layout -> (ranks, ranks with different data).
LAYOUTS = {
    "tp1": (1, 1),
    "dp2,ep2": (2, 2),
    "dp4,ep4": (4, 4),
    "dp4,ep2": (4, 4),
    "rep2,dp2,ep2": (4, 4),
    "dp2,ep2,tp2": (4, 2),
    "tp2": (2, 1),
    "dp2,tp2": (4, 2),
    "cp2,ep2": (2, 1),
    "dp2,cp2,ep4": (4, 2),
    "pp2,dp2,ep2": (4, 2),
    "pp2,tp2": (4, 1),
}


class Tokens(L.LightningModule):
    """Trains a language model with experts on the next token; records losses and gradient norms."""

    def __init__(self, family: str = "mixtral", **changes: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.model = language_model(family, **changes)
        self.losses: list[float] = []
        self.norms: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self.model(batch).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(self.trainer.callback_metrics["loss"].item())
        self.norms.append(self.trainer.callback_metrics["gradient_norm"].item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def loader(data_rank: int, num_data: int) -> DataLoader[Any]:
    """Return the rows of one data-parallel rank in each batch of one device."""
    generator = torch.Generator().manual_seed(11)
    rows = torch.randint(0, VOCAB, (ROWS * STEPS, TOKENS), generator=generator)
    return DataLoader([batch.chunk(num_data)[data_rank] for batch in rows.split(ROWS)], batch_size=None)


def data_rank_of(rank: int, layout: str) -> int:
    sizes = {name: int(size) for name, size in re.findall(r"([a-z]+)(\d)", layout)}
    return rank // (sizes.get("tp", 1) * sizes.get("cp", 1)) % LAYOUTS[layout][1]


def strategy_of(layout: str, stage: int | None, **options: Any) -> WeftModelParallelStrategy:
    if "pp2" in layout:
        options |= {"pipeline_cuts": ["model.layers.1"], "pipeline_module": "model", "num_micro_batches": 2}
    return WeftModelParallelStrategy(**{"plan": "auto", "layout": layout, "zero_stage": stage, **options})


def fit(
    rank: int, world_size: int, folder: str, layout: str, stage: int | None, family: str, **options: Any
) -> dict[str, Any]:
    """Train; return the losses and, without stages, the weights."""
    set_torchrun_environment(rank, world_size)
    module = Tokens(family)
    run = trainer(world_size, strategy_of(layout, stage, **options), folder, gradient_clip_val=0.5, log_every_n_steps=1)
    run.fit(module, loader(data_rank_of(rank, layout), LAYOUTS[layout][1]))
    found = {"losses": module.losses, "norms": module.norms}
    return found if "pp2" in layout else {**found, "weights": weights(module)}


CASES = [
    *((layout, stage, "mixtral") for layout in ("dp2,ep2", "dp4,ep4", "rep2,dp2,ep2") for stage in (0, 1, 3)),
    *(("dp4,ep2", stage, "mixtral") for stage in (0, 1, 2, 3)),
    *((layout, stage, "mixtral") for layout in ("dp2,ep2,tp2", "pp2,dp2,ep2") for stage in (0, 1, 3)),
    *((layout, stage, "mixtral") for layout in ("cp2,ep2", "tp2", "pp2,tp2") for stage in (0,)),
    *((layout, stage, "mixtral") for layout in ("dp2,cp2,ep4", "dp2,tp2") for stage in (3,)),
    *((layout, stage, family) for layout, stage in (("tp2", 0), ("dp4,ep2", 3)) for family in OTHER_FAMILIES),
]


@functools.cache
def on_one_device(folder: str, family: str) -> dict[str, Any]:
    [result] = run_on_ranks(1, fit, folder=folder, layout="tp1", stage=0, family=family)
    return result


@pytest.mark.parametrize(("layout", "stage", "family"), CASES)
def test_training_matches_one_device(
    tmp_path_factory: pytest.TempPathFactory, layout: str, stage: int, family: str
) -> None:
    folder = str(tmp_path_factory.getbasetemp())
    expected = on_one_device(folder, family)
    arguments = {"folder": folder, "layout": layout, "stage": stage, "family": family}
    for found in run_on_ranks(LAYOUTS[layout][0], fit, **arguments):
        torch.testing.assert_close(found["losses"], expected["losses"], rtol=1e-10, atol=0)
        torch.testing.assert_close(found["norms"], expected["norms"], rtol=1e-9, atol=0)
        if "weights" in found:
            assert_same_weights(found["weights"], expected["weights"], 1e-10)
