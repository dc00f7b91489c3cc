"""Pretrained models in pipeline stages: logits and gradients equal one device, and saving gives the same files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning_plugin.scripts.plugin_models import set_torchrun_environment, trainer, weights
from torch import Tensor, nn
from torch.utils.data import DataLoader

import weft
from support import pretrained
from support.ranks import on_ranks
from weft.lightning import WeftModelParallelStrategy

TOLERANCE = 1e-10
NUM_MICRO_BATCHES = 2


class OneStep(L.LightningModule):
    """Trains for one step of SGD with the learning rate 1; saves the pretrained model before."""

    def __init__(self, path: Path, saved: Path) -> None:
        super().__init__()
        self.path, self.saved, self.losses = path, saved, []
        self.network: Any = None
        self.example_input_array = {"input_ids": pretrained.tokens()}

    def forward(self, input_ids: Tensor) -> Any:
        return self.network(input_ids=input_ids)

    def configure_model(self) -> None:
        if self.network is None:
            self.network = pretrained.load(self.path)

    def on_train_start(self) -> None:
        weft.save_pretrained(self.network, self.saved)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return _loss(self.network, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def _loss(model: Any, batch: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(input_ids=batch).logits.flatten(0, 1), batch.flatten())


def _after_one_step(path: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the parameters of one device after the step, and its gradients, from the same micro-batches.

    Gemma's own code sums over a micro-batch in float32.
    """
    model = pretrained.load(path)
    for part in pretrained.tokens().chunk(NUM_MICRO_BATCHES):
        (_loss(model, part) / NUM_MICRO_BATCHES).backward()
    parameters = {name: p for name, p in model.named_parameters() if p.grad is not None}
    return {n: (p - p.grad).detach() for n, p in parameters.items()}, {n: p.grad for n, p in parameters.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stages")
    for family in pretrained.FAMILIES:
        pretrained.save(family, folder)
    return folder


@on_ranks(2, 4)
@pytest.mark.parametrize("family", pretrained.FAMILIES)
def test_each_family_in_stages(rank: int, world_size: int, folder: Path, family: str) -> None:
    set_torchrun_environment(rank, world_size)
    layout = {2: "pp2", 4: "pp2,tp2"}[world_size]
    # OPT registers the last norm before the blocks: only a recorded call shows that it belongs to the last stage.
    cuts: Any = "auto" if family == "opt" else [pretrained.second_block(family)]
    strategy = WeftModelParallelStrategy(
        plan="auto",
        layout=layout,
        pipeline_cuts=cuts,
        pipeline_module="network",
        num_micro_batches=NUM_MICRO_BATCHES,
    )
    saved = folder / layout / family
    model = OneStep(folder / family, saved)
    run = trainer(world_size, strategy, folder / "runs")
    run.fit(model, DataLoader([pretrained.tokens()], batch_size=None))
    expected, gradients = _after_one_step(folder / family)
    scale = max(gradient.norm().item() for gradient in gradients.values())
    ours = weights(model.network)
    assert ours
    for name, value in ours.items():
        if name in expected:
            difference = (value - expected[name]).norm()
            assert difference <= TOLERANCE * max(gradients[name].norm().item(), 1e-3 * scale), name
    if rank == 0:
        pretrained.assert_same_directories(saved, folder / family)
