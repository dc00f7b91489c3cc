"""Plain loaders go on after the last batch of a checkpoint, in the order of the undisturbed run."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning_plugin.scripts.plugin_models import (
    DIM,
    Model,
    assert_same_weights,
    loader,
    set_torchrun_environment,
    trainer,
    weights,
)
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from support.ranks import on_ranks, run_on_ranks
from weft._plugin.resumable_loaders import ResumableLoader, make_resumable
from weft.lightning import Preemption, WeftModelParallelStrategy

NUM_SAMPLES = 24


def _data(num_samples: int = NUM_SAMPLES) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(num_samples, DIM, dtype=torch.float64, generator=generator)


def _batch_sampler(data: Tensor) -> BatchSampler:
    return BatchSampler(RandomSampler(data), batch_size=4, drop_last=False)


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "shuffled": ("tp2", {"shuffle": True, "batch_size": 4}),
    "own generator": ("tp2", {"shuffle": True, "batch_size": 4, "generator": True}),
    "batch sampler": ("tp2", {"batch_sampler": _batch_sampler}),
    "distributed": ("dp2", {"shuffle": True, "batch_size": 2}),
    "workers": ("dp2", {"shuffle": True, "batch_size": 2, "num_workers": 2}),
}


def _fit(world_size: int, folder: Path, case: str, stops: list[int]) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Train two epochs of six batches, stopped after some steps; return the weights, and the batches of this rank."""
    layout, options = CASES[case]
    path: str | None = None
    batches = []
    for number, stop in enumerate([*stops, 0]):
        model, data = Model(dropout=0.5, seed=number), _data()
        torch.manual_seed(100 * number)
        made = {name: value(data) if name == "batch_sampler" else value for name, value in options.items()}
        if "generator" in options:
            made["generator"] = torch.Generator().manual_seed(number)
        runs: list[L.Trainer] = []
        preemption = Preemption(folder, should_stop=lambda runs=runs, stop=stop: runs[0].global_step == stop)
        strategy = WeftModelParallelStrategy(plan="auto", layout=layout)
        run = trainer(world_size, strategy, folder, max_epochs=2, callbacks=[preemption], use_distributed_sampler=True)
        runs.append(run)
        if stop:
            with pytest.raises(SystemExit):
                run.fit(model, DataLoader(data, **made), ckpt_path=path)
            path = preemption.last_checkpoint()
        else:
            run.fit(model, DataLoader(data, **made), ckpt_path=path)
        batches += model.batches
    assert run.global_step == 12
    return weights(model), batches


@on_ranks(2)
@pytest.mark.parametrize("case", CASES)
def test_resumed_training_gets_the_next_batches(rank: int, world_size: int, tmp_path: Path, case: str) -> None:
    """Stopped twice within an epoch, and at its end and after the next step."""
    set_torchrun_environment(rank, world_size)
    expected, expected_batches = _fit(world_size, tmp_path / "undisturbed", case, [])
    assert not torch.equal(torch.cat(expected_batches[:6]), torch.cat(expected_batches[6:]))
    for name, stops in (("within", [2, 3, 9]), ("end", [6, 7])):
        found, batches = _fit(world_size, tmp_path / name, case, stops)
        assert len(batches) == 12
        for idx, (one, other) in enumerate(zip(batches, expected_batches, strict=True)):
            assert torch.equal(one, other), f"{name}: batch {idx}"
        assert_same_weights(found, expected, rtol=0.0)


@on_ranks(2)
def test_epochs_that_leave_out_batches(rank: int, world_size: int, tmp_path: Path) -> None:
    """An epoch begins with the first batch, also if the one before has ended before the loader."""
    set_torchrun_environment(rank, world_size)
    found = {}
    for name, stops in (("undisturbed", []), ("end", [3]), ("within", [4])):
        path, batches = None, []
        for stop in [*stops, 0]:
            runs: list[L.Trainer] = []
            preemption = Preemption(tmp_path / name, should_stop=lambda runs=runs, at=stop: runs[0].global_step == at)
            run = trainer(world_size, "weft", tmp_path, max_epochs=2, callbacks=[preemption], limit_train_batches=3)
            runs.append(run)
            model = Model()
            with pytest.raises(SystemExit) if stop else contextlib.nullcontext():
                run.fit(model, loader(), ckpt_path=path)
            path = preemption.last_checkpoint()
            batches += model.batches
        found[name] = torch.stack(batches)
    assert torch.equal(found["undisturbed"], _fixed_batches()[[0, 1, 2, 0, 1, 2]])
    assert all(torch.equal(batches, found["undisturbed"]) for batches in found.values())


def _fixed_batches() -> Tensor:
    return torch.stack(list(loader()))


def _elastic(rank: int, world_size: int, folder: str, last: int, path: str | None) -> dict[str, Tensor]:
    """Train to step `last` with 24 samples a step, whatever the number of ranks."""
    set_torchrun_environment(rank, world_size)
    strategy = WeftModelParallelStrategy(plan="auto", layout=f"dp{world_size}")
    runs: list[L.Trainer] = []
    preemption = Preemption(folder, should_stop=lambda: runs[0].global_step == last)
    run = trainer(world_size, strategy, folder, max_epochs=3, callbacks=[preemption], use_distributed_sampler=True)
    runs.append(run)
    model = Model(seed=0 if path is None else 99)
    with pytest.raises(SystemExit):
        run.fit(model, DataLoader(_data(120), batch_size=24 // world_size, shuffle=True), ckpt_path=path)
    return weights(model)


def test_other_numbers_of_ranks_go_on_with_the_next_samples(tmp_path: Path) -> None:
    """A job of 8 ranks comes back with 6, 4 and 8 ranks, within epochs of 5 steps."""
    folder = str(tmp_path)
    expected = run_on_ranks(4, _elastic, folder=str(tmp_path / "undisturbed"), last=11, path=None)[0]
    path = None
    for num_ranks, last in ((8, 2), (6, 4), (4, 8), (8, 11)):
        found = run_on_ranks(num_ranks, _elastic, folder=folder, last=last, path=path)[0]
        path = str(tmp_path / "preempted.ckpt")
    assert_same_weights(found, expected, rtol=1e-9)


@on_ranks(1)
def test_files_of_weft_resume_in_a_stock_trainer(tmp_path: Path) -> None:
    """Lightning raises an error for positions of loaders that have none in its own run."""
    strategy = WeftModelParallelStrategy(plan="auto", save_distributed_checkpoint=False)
    run = trainer(1, strategy, tmp_path, max_steps=2)
    run.fit(Model(), loader())
    run.save_checkpoint(tmp_path / "last.ckpt")
    assert torch.load(tmp_path / "last.ckpt", weights_only=False)["weft_loaders"][0]["num_batches"] == 2
    stock = trainer(1, "auto", tmp_path, max_steps=4, max_epochs=2)
    stock.fit(Model(), loader(), ckpt_path=tmp_path / "last.ckpt", weights_only=False)
    assert stock.global_step == 4


def test_positions_of_other_batches_raise() -> None:
    def made(batch_size: int, num_data_ranks: int) -> ResumableLoader:
        data_loader = make_resumable(DataLoader(_data(), batch_size=batch_size), num_data_ranks)
        assert isinstance(data_loader, ResumableLoader)
        return data_loader

    source = made(4, 2)
    batches = iter(source)
    for _ in range(3):
        next(batches)
    state = source.state_dict()
    text = (
        "saved after 3 batches of an epoch, of batch_size=4 on 2 data-parallel ranks, and the loader has batch_size=5"
    )
    with pytest.raises(ValueError, match=text):
        made(5, 1).load_state_dict(state)
    target = made(2, 1)
    target.load_state_dict(state)
    assert target.state_dict()["num_batches"] == 12 % len(target)
    target = made(8, 1)
    target.load_state_dict(state)
    assert target.state_dict()["num_batches"] == 0  # all 24 samples are used: the next epoch
    assert list(map(len, made(4, 1))) == [4] * 6
