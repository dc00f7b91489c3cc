"""Dry runs of a LightningModule (`weft estimate --module`) predict the memory of ranks under the Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning_plugin.scripts.plugin_models import set_torchrun_environment, trainer
from ops.memory.counting import counted
from torch import Tensor

import support.warm_starts  # noqa: F401  (for dry runs)
import weft
from support.example_modules import load_example
from support.ranks import on_ranks
from weft.lightning import WeftModelParallelStrategy
from weft.strategy.dry_run import Request
from weft.strategy.dry_run.entry import estimate_all

SEQUENCES, TOKENS, NUM_STEPS = 4, 64, 4
# The Trainer holds a batch more than a dry run, and its checks of the ranks use staging buffers of their own.
PEAK_BOUND = 0.02
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("tp2", "32-true", {}),
    ("dp2", "bf16-mixed", {"activation_checkpointing": "full"}),
    ("tp2", "bf16-true", {"optimizer_in_backward": True}),
    ("dp2", "32-true", {"zero_stage": 0}),
    ("pp2", "32-true", {"pipeline_cuts": "auto"}),
    ("pp2", "bf16-mixed", {"pipeline_cuts": ["layers.1"], "pipeline_schedule": "gpipe"}),
]


class LitText(pl.LightningModule):
    """The text model of the examples, built in `configure_model`."""

    def __init__(self) -> None:
        super().__init__()
        self.model: Any = None
        self.began = False

    def configure_model(self) -> None:
        if self.model is None:
            example = load_example("model")
            self.model = example.Transformer(example.ModelArgs(dim=128, n_layers=3, n_heads=8, hidden_dim=384))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 1 and not self.began:  # recognizing this small model takes more memory than training it
            self.began = True
            weft.memory.reset_peak()
        logits = self.model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer)}


def batch() -> Tensor:
    return torch.arange(SEQUENCES * (TOKENS + 1)).remainder(251).view(SEQUENCES, TOKENS + 1)


@pytest.fixture(scope="module")
def predictions() -> list[dict[int, dict[str, int]]]:
    """Return the bytes by category at the peak of each case, by the rank; with stages, of all ranks."""
    found = estimate_all([Request(LitText, layout, batch, precision=p, **options) for layout, p, options in CASES])
    return [
        {each.rank: max(each.phases.values(), key=lambda usage: sum(usage.values())) for each in case.ranks}
        for case in found
    ]


@on_ranks(2, timeout=300)
def test_peaks_are_those_of_the_trainer(
    rank: int, world_size: int, tmp_path: Path, predictions: list[dict[int, dict[str, int]]]
) -> None:
    set_torchrun_environment(rank, world_size)
    for (layout, precision, options), predicted_by_rank in zip(CASES, predictions, strict=True):
        with counted():
            before = weft.memory.by_category()
            strategy = WeftModelParallelStrategy(plan="auto", layout=layout, **options)
            run = trainer(world_size, strategy, tmp_path, precision=precision)
            batches = [batch() for _ in range(NUM_STEPS)]
            run.fit(LitText(), torch.utils.data.DataLoader(batches, batch_size=None))
            peak = weft.memory.by_category(at="peak")
            del run, strategy
        predicted = predicted_by_rank.get(rank)
        if predicted is None:
            continue
        actual = {name: peak[name] - before[name] for name in peak}
        # The staging buffers of the default group were used by earlier cases.
        actual["communication"] = predicted["communication"]
        case = (layout, precision, options, actual, predicted)
        assert actual["parameters"] == predicted["parameters"], case
        assert actual["optimizer_state"] == predicted["optimizer_state"], case
        assert abs(sum(predicted.values()) - sum(actual.values())) <= PEAK_BOUND * sum(actual.values()), case
