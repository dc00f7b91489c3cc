"""Expert-parallel ranks under the Trainer and Fabric: models with experts train like on one device."""

from __future__ import annotations

import functools
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning_plugin.scripts.plugin_models import assert_same_weights, set_torchrun_environment, trainer, weights
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from support.hugging_face import EXPERT_CONFIGS, VOCAB, language_model
from support.ranks import run_on_ranks
from weft.lightning import WeftModelParallelStrategy

ROWS, TOKENS, STEPS = 4, 9, 10
# Layout -> (ranks, ranks with different data).
LAYOUTS = {
    "dp2,ep2": (2, 2),
    "dp4,ep4": (4, 4),
    "dp4,ep2": (4, 4),
    "rep2,dp2,ep2": (4, 4),
    "dp2,ep2,tp2": (4, 2),
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

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def loader(data_rank: int, num_data: int) -> DataLoader[Any]:
    """Return the rows of one data-parallel rank in each batch of one device."""
    generator = torch.Generator().manual_seed(11)
    rows = torch.randint(0, VOCAB, (ROWS * STEPS, TOKENS), generator=generator)
    return DataLoader([batch.chunk(num_data)[data_rank] for batch in rows.split(ROWS)], batch_size=None)


def fit(rank: int, world_size: int, folder: str, layout: str, stage: int | None, family: str) -> dict[str, Any]:
    set_torchrun_environment(rank, world_size)
    module = Tokens(family)
    num_data = LAYOUTS[layout][1] if layout in LAYOUTS else 1
    strategy = WeftModelParallelStrategy(plan="auto", layout=layout, zero_stage=stage)
    run = trainer(world_size, strategy, folder, gradient_clip_val=0.5)
    run.fit(module, loader(rank * num_data // world_size, num_data))
    shards = {
        name: parameter._local_tensor.shape
        for name, parameter in module.named_parameters()
        if "experts" in name and isinstance(parameter, DTensor)
    }
    return {"losses": module.losses, "weights": weights(module), "shards": shards}


CASES = [
    *((layout, stage, "mixtral") for layout in LAYOUTS for stage in (0, 1, 3)),
    ("dp4,ep2", 2, "mixtral"),
    *(("dp2,ep2", 0, family) for family in EXPERT_CONFIGS if family != "mixtral"),
    *(("dp4,ep2", 3, family) for family in EXPERT_CONFIGS if family != "mixtral"),
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
        assert_same_weights(found["weights"], expected["weights"], 1e-10)
