"""A resumed run draws the random numbers that the undisturbed one would have drawn."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from lightning_plugin.scripts.plugin_models import (
    BATCH,
    DIM,
    NUM_BATCHES,
    Model,
    assert_same_weights,
    loader,
    set_torchrun_environment,
    trainer,
    weights,
)
from torch import Tensor

from support.ranks import on_ranks, run_on_ranks
from weft._plugin.console import Console
from weft.lightning import Preemption, WeftModelParallelStrategy
from weft.strategy.checkpoint import open_checkpoint


class Noisy(Model):
    """Multiplies its input by random numbers of all generators, besides its dropout."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        factors = (random.gauss(1.0, 0.1), numpy.random.normal(1.0, 0.1), float(torch.rand(())) + 0.5)
        return super().training_step(batch * float(numpy.prod(factors)), batch_idx)


def _train(rank: int, world_size: int, folder: str, layout: str, stops: list[int]) -> dict[str, Tensor]:
    """Train two epochs, stopped after the given steps; the generators differ between ranks with different data."""
    set_torchrun_environment(rank, world_size)
    path: str | None = None
    for number, stop in enumerate([*stops, 0]):
        model = Noisy(dropout=0.5, seed=number)
        seed = 100 * number + (rank if layout == "dp2" else 0)
        torch.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed)
        random.gauss(0.0, 1.0)  # keeps a second number
        runs: list[Any] = []
        preemption = Preemption(folder, should_stop=lambda runs=runs, stop=stop: runs[0].global_step == stop)
        strategy = WeftModelParallelStrategy(plan="auto", layout=layout)
        run = trainer(world_size, strategy, folder, max_epochs=2, callbacks=[preemption])
        runs.append(run)
        data = torch.utils.data.DataLoader(_fixed(), batch_size=BATCH, shuffle=False)
        if stop:
            with pytest.raises(SystemExit):
                run.fit(model, data, ckpt_path=path)
            path = preemption.last_checkpoint()
        else:
            run.fit(model, data, ckpt_path=path)
    assert run.global_step == 2 * NUM_BATCHES
    return weights(model)


def _fixed() -> Tensor:
    """Equal batches, because a plain loader starts again at the first one."""
    return torch.linspace(-1, 1, DIM, dtype=torch.float64).expand(BATCH * NUM_BATCHES, DIM).contiguous()


@pytest.mark.parametrize("layout", ["tp2", "dp2"])
def test_resumed_training_draws_the_same_numbers(tmp_path: Path, layout: str) -> None:
    """Stopped within an epoch and at its end."""
    expected = run_on_ranks(2, _train, folder=str(tmp_path / "a"), stops=[], layout=layout)
    for name, stops in (("within", [2, 9]), ("end", [6, 7, 9])):
        found = run_on_ranks(2, _train, folder=str(tmp_path / name), stops=stops, layout=layout)
        for one, other in zip(expected, found, strict=True):
            assert_same_weights(one, other, rtol=0.0)


@on_ranks(2)
def test_other_numbers_of_data_ranks_are_reported(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    texts: list[str] = []

    def fit(layout: str, path: Path | None, max_steps: int) -> None:
        strategy = WeftModelParallelStrategy(plan="auto", layout=layout)
        run = trainer(world_size, strategy, tmp_path, max_steps=max_steps)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Console, "log", lambda _, text: texts.append(text))
            run.fit(Model(), loader(), ckpt_path=path)
        run.save_checkpoint(tmp_path / f"{layout}.ckpt")

    fit("dp2", None, 1)
    assert not any("random states" in text for text in texts)
    fit("tp2", tmp_path / "dp2.ckpt", 2)
    [text] = [text for text in texts if "random states" in text]
    assert "has the random states of 2 data-parallel ranks, and this run has 1" in text
    texts.clear()
    fit("dp2", tmp_path / "dp2.ckpt", 3)
    assert not any("random states" in text for text in texts)


@on_ranks(1)
def test_checkpoints_with_weights_only_have_no_states(tmp_path: Path) -> None:
    run = trainer(1, "weft", tmp_path)
    run.fit(Model(), loader())
    for weights_only in (True, False):
        path = tmp_path / f"{weights_only}.ckpt"
        run.save_checkpoint(path, weights_only=weights_only)
        names = open_checkpoint(path).metadata.state_dict_metadata
        found = {name.split(".")[2] for name in names if name.startswith("random_states.0.")}
        assert found == (set() if weights_only else {"torch", "python", "python_gauss", "numpy", "numpy_gauss"})
