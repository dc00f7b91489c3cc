"""Loaders with a state of their own resume on each data-parallel rank, at the batch after the last step."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning_plugin.scripts.plugin_models import (
    DIM,
    Model,
    assert_same_weights,
    set_torchrun_environment,
    trainer,
    weights,
)
from torch import Tensor
from torch.utils.data import IterableDataset

from support.ranks import on_ranks
from weft.lightning import WeftModelParallelStrategy

NUM_BATCHES, ROWS = 5, 2


class Stream(IterableDataset[Tensor]):
    """The rows of one data-parallel rank, with a position and the name of its source; also a loader of batches."""

    def __init__(self, source: int) -> None:
        generator = torch.Generator().manual_seed(source)
        self.rows = torch.randn(NUM_BATCHES * ROWS, DIM, dtype=torch.float64, generator=generator)
        self.source, self.position, self.loaded = source, {"row": 0}, []

    def _next_rows(self, number: int) -> Iterator[Tensor]:
        while self.position["row"] < len(self.rows):
            first = self.position["row"]
            self.position["row"] += number
            yield self.rows[first] if number == 1 else self.rows[first : first + number]
        self.position["row"] = 0

    def __iter__(self) -> Iterator[Tensor]:
        return self._next_rows(1)

    def state_dict(self) -> dict[str, Any]:
        return {"source": self.source, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded.append(state["source"])
        self.position = dict(state["position"])


class Batches(Stream):
    def __iter__(self) -> Iterator[Tensor]:
        return self._next_rows(ROWS)


def _loader(kind: str, source: int) -> tuple[Any, Stream]:
    """Return a loader without a length, and its stream."""
    if kind == "own":
        batches = Batches(source)
        return batches, batches
    from torchdata.stateful_dataloader import StatefulDataLoader

    stream = Stream(source)
    return StatefulDataLoader(stream, batch_size=ROWS), stream


class SaveAt(Callback):
    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, run: Any, *_: Any) -> None:
        if run.global_step == self.step:
            run.save_checkpoint(self.path)


def _fit(layout: str, folder: Path, loader: Any, **settings: Any) -> Model:
    model = Model(optimizer="sgd")
    strategy = WeftModelParallelStrategy(plan="auto", layout=layout, **settings.pop("options", {}))
    trainer(2, strategy, folder, **settings.pop("trainer", {})).fit(model, loader, **settings)
    return model


@on_ranks(2)
@pytest.mark.parametrize("kind", ["own", "torchdata"])
@pytest.mark.parametrize("layout", ["dp2", "tp2"])
def test_streams_resume_at_the_next_batch(rank: int, world_size: int, tmp_path: Path, layout: str, kind: str) -> None:
    """Within an epoch, before its first batch, and at its end; also without comparisons of batches."""
    if kind == "torchdata" and importlib.util.find_spec("torchdata") is None:
        pytest.skip("the package torchdata is not installed")
    set_torchrun_environment(rank, world_size)
    source = rank if layout == "dp2" else 0
    undisturbed = _fit(layout, tmp_path, _loader(kind, source)[0], trainer={"max_epochs": 2})
    expected = undisturbed.batches
    for step, options in ((3, {}), (NUM_BATCHES, {}), (1, {"check_batches": 0})):
        path = tmp_path / f"{step}"
        stopped = {"max_steps": step, "callbacks": [SaveAt(step, path)]}
        first = _fit(layout, tmp_path, _loader(kind, source)[0], trainer=stopped, options=options)
        loader, stream = _loader(kind, source)
        second = _fit(layout, tmp_path, loader, trainer={"max_epochs": 2}, options=options, ckpt_path=path)
        found = first.batches + second.batches
        assert len(found) == len(expected) == 2 * NUM_BATCHES, step
        for idx, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert torch.equal(one, other), f"saved at step {step}: batch {idx}"
        assert set(stream.loaded) == {source}
        assert_same_weights(weights(second), weights(undisturbed), rtol=0.0)


@on_ranks(2)
def test_other_numbers_of_data_ranks_get_the_first_ranks_state(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    path = tmp_path / "saved"
    _fit("dp2", tmp_path, Batches(rank), trainer={"max_steps": 2, "callbacks": [SaveAt(2, path)]})
    stream = Batches(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = _fit("tp2", tmp_path, stream, trainer={"max_epochs": 1}, ckpt_path=path)
    text = "the training loaders of 2 data-parallel ranks, and this run has 1: each loader gets that of the first rank"
    assert any(text in str(each.message) for each in caught) == (rank == 0)
    assert stream.loaded == [0] and torch.equal(model.batches[0], stream.rows[2 * ROWS : 3 * ROWS])
