"""Trains a small Llama with a combination of options, and compares it with a run on one device."""

from __future__ import annotations

import dataclasses
import functools
import re
import warnings
from typing import Any
from unittest import mock

import lightning as L
import torch
import torch.nn.functional as F
from combinations.options import OPTIONS, Combination
from lightning.pytorch.plugins import MixedPrecision
from lightning_plugin.scripts.plugin_models import set_torchrun_environment, trainer, weights
from torch import Tensor, nn

from support.models import Llama, LlamaArgs
from support.ranks import run_on_ranks
from weft.lightning import WeftModelParallelStrategy
from weft.strategy.optimizers import offloaded_states

# Weights of 4096 elements and more get low-precision states.
ARGS = LlamaArgs(dim=64, n_layers=4, n_heads=4, n_kv_heads=2, hidden_dim=96, vocab_size=48)
NUM_BATCHES, BATCH = 4, 4
# The largest relative difference of the change of a weight that training makes. A forgotten sum or average over ranks
# makes it 0.5 or more; rounding to bfloat16 and to states of 8 bits depends on the shards.
TOLERANCE, LOW_TOLERANCE = 1e-3, 0.2


class Text(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model: nn.Module | None = None
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.model is None:
            torch.manual_seed(3)
            self.model = Llama(ARGS)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self.model(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def _batches(layout: str, rank: int) -> torch.utils.data.DataLoader:
    """Return the batches of a rank: equal rows of each batch on the data-parallel ranks."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(ARGS.vocab_size, (NUM_BATCHES, BATCH, 13), generator=generator)
    if "dp2" in layout:
        tokens = tokens.chunk(2, dim=1)[rank // (2 if "tp2" in layout else 1) % 2]
    return torch.utils.data.DataLoader(tokens.flatten(0, 1), batch_size=tokens.shape[1])


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a combination: the sentence of the error that all ranks raise, or the largest difference."""

    combination: Combination
    error: str = ""
    difference: float = 0.0

    @property
    def is_equal(self) -> bool:
        return not self.error and self.difference <= (LOW_TOLERANCE if self.combination.is_low else TOLERANCE)

    @property
    def is_allowed(self) -> bool:
        return bool(self.error) or self.is_equal


def fit(rank: int, world_size: int, folder: str, layout: str, names: tuple[str, ...]) -> str | dict[str, Tensor]:
    """Return the full weights after training, by name; or the sentence of a ValueError, which is the refusal."""
    set_torchrun_environment(rank, world_size)
    strategy: dict[str, Any] = {"plan": "auto", "layout": layout}
    settings: dict[str, Any] = {}
    if "pp" in layout:
        strategy |= {"pipeline_cuts": ["layers.2"], "pipeline_module": "model", "num_micro_batches": 2}
    for name in names:
        strategy |= OPTIONS[name].strategy
        settings |= OPTIONS[name].trainer
    if settings.get("precision") == "16-mixed":  # with a strategy object, Lightning takes it only as a plugin
        del settings["precision"]
        settings["plugins"] = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))]
    model = Text()
    offloads_all = mock.patch.object(offloaded_states, "MIN_BYTES", 1)  # the model's states are small
    with warnings.catch_warnings(), offloads_all:
        warnings.simplefilter("ignore")
        try:
            trainer(world_size, WeftModelParallelStrategy(**strategy), folder, **settings).fit(
                model, _batches(layout, rank)
            )
        except ValueError as error:
            return _sentence(str(error))
    return {name: value.float() for name, value in weights(model.model).items()}


def _sentence(text: str) -> str:
    return re.sub(r"\s+", " ", text).removeprefix("WeftModelParallelStrategy").strip(": ")


@functools.cache
def expected(folder: str, names: tuple[str, ...]) -> dict[str, Tensor]:
    [found] = run_on_ranks(1, fit, folder=folder, layout="tp1", names=names)
    if isinstance(found, str):
        raise TypeError(f"the options {names} fail on one device: {found}")
    return found


@functools.cache
def initial() -> dict[str, Tensor]:
    torch.manual_seed(3)
    return {name: value.detach() for name, value in Llama(ARGS).named_parameters()}


def run(combination: Combination, folder: str) -> Outcome:
    """Run a combination on its ranks, and its options that change results on one device.

    Raises:
        RankFailure: a rank raises another error than ValueError, or the ranks raise different ones.
    """
    results = run_on_ranks(
        combination.world_size,
        fit,
        keeps_groups=True,
        folder=folder,
        layout=combination.layout,
        names=combination.names,
    )
    sentences = {result for result in results if isinstance(result, str)}
    if sentences:
        if len(sentences) > 1 or not all(isinstance(result, str) for result in results):
            raise AssertionError(f"{combination}: the ranks raise different errors: {sentences}")
        return Outcome(combination, error=sentences.pop())
    wanted, before = expected(folder, combination.reference), initial()
    difference = 0.0
    for found in results:
        for name, value in found.items():
            change = (wanted[name] - before[name]).norm()
            # A split weight shows its upper half, so that the last bit of a bfloat16 is no difference.
            rounding = 2.0**-8 * wanted[name].abs() if 'master_weights="split"' in combination.names else 0.0
            distance = ((value - wanted[name]).abs() - rounding).clamp(min=0)
            difference = max(difference, (distance.norm() / change).item())
    return Outcome(combination, difference=difference)
