"""Plain loaders go on after the last batch of a checkpoint, in the order of the undisturbed run."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
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
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, Sampler

from support.ranks import on_ranks, run_on_ranks
from weft._plugin.resumable_loaders import ResumableLoader, make_resumable
from weft.lightning import Preemption, WeftModelParallelStrategy
from weft.strategy.checkpoint import open_checkpoint

NUM_SAMPLES = 24


def _data(num_samples: int = NUM_SAMPLES) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(num_samples, DIM, dtype=torch.float64, generator=generator)


def _batch_sampler(data: Tensor) -> BatchSampler:
    return BatchSampler(RandomSampler(data), batch_size=4, drop_last=False)


class Noisy(Dataset[Tensor]):
    """Samples with noise that is drawn when they are loaded."""

    def __init__(self, data: Tensor) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, idx: int) -> Tensor:
        return self.data[idx] + 0.1 * torch.randn(DIM, dtype=torch.float64)


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "shuffled": ("tp2", {"shuffle": True, "batch_size": 4}),
    "noise": ("tp2", {"shuffle": True, "batch_size": 4, "dataset": Noisy}),
    "own generator": ("tp2", {"shuffle": True, "batch_size": 4, "generator": True}),
    "batch sampler": ("tp2", {"batch_sampler": _batch_sampler}),
    "distributed": ("dp2", {"shuffle": True, "batch_size": 2}),
    "generator of a rank": ("dp2", {"shuffle": True, "batch_size": 4, "generator": True}),
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
        dataset = made.pop("dataset", lambda data: data)(data)
        if "generator" in options:
            made["generator"] = torch.Generator().manual_seed(2 * number + (dist.get_rank() if layout == "dp2" else 0))
        runs: list[L.Trainer] = []
        preemption = Preemption(folder, should_stop=lambda runs=runs, stop=stop: runs[0].global_step == stop)
        strategy = WeftModelParallelStrategy(plan="auto", layout=layout)
        splits = "generator" not in options  # among ranks
        run = trainer(
            world_size, strategy, folder, max_epochs=2, callbacks=[preemption], use_distributed_sampler=splits
        )
        runs.append(run)
        if stop:
            with pytest.raises(SystemExit):
                run.fit(model, DataLoader(dataset, **made), ckpt_path=path)
            path = preemption.last_checkpoint()
        else:
            run.fit(model, DataLoader(dataset, **made), ckpt_path=path)
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


@on_ranks(1)
def test_checkpoints_of_an_epochs_end_have_the_sampler_state(tmp_path: Path) -> None:
    """ModelCheckpoint saves when Lightning has counted the epoch; Lightning then restores no state of loaders."""
    found = {}
    for name, path in (("undisturbed", None), ("resumed", tmp_path / "undisturbed" / "epoch=0-step=6.ckpt")):
        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(0)
        data = DataLoader(_data(), batch_size=4, shuffle=True, generator=generator)
        keep = ModelCheckpoint(tmp_path / name, save_top_k=-1)
        run = trainer(1, "weft", tmp_path, max_epochs=2, callbacks=[keep], enable_checkpointing=True)
        model = Model()
        run.fit(model, data, ckpt_path=path)
        found[name] = model.batches[-6:]
    assert len(found["resumed"]) == 6
    assert all(torch.equal(one, other) for one, other in zip(found["undisturbed"], found["resumed"], strict=True))


@on_ranks(1)
def test_positions_are_those_of_training(tmp_path: Path) -> None:
    """One loader is also the validation's, and a callback takes a batch of it; a save before the first step."""

    class Look(Callback):
        def on_train_start(self, run: Any, module: Any) -> None:
            next(iter(run.train_dataloader))
            run.save_checkpoint(tmp_path / "start.ckpt")

        def on_validation_end(self, run: Any, module: Any) -> None:
            if run.global_step == 4:
                run.save_checkpoint(tmp_path / "validated.ckpt")

    def saved(name: str) -> int:
        [position] = open_checkpoint(tmp_path / name).rest()["weft_loaders"]
        return int(position["num_batches"])

    data = loader()
    run = trainer(1, "weft", tmp_path, callbacks=[Look()], val_check_interval=2)
    run.fit(Model(), data, data)
    assert saved("start.ckpt") == 0 and saved("validated.ckpt") == 4
    model = Model()
    run = trainer(1, "weft", tmp_path, callbacks=[Look()], limit_val_batches=0)
    run.fit(model, data, ckpt_path=tmp_path / "validated.ckpt")
    assert saved("start.ckpt") == 4
    assert torch.equal(torch.stack(model.batches), _fixed_batches()[4:])
    assert type(data) is DataLoader and len(list(data)) == 6


class WithoutData(Model):
    def train_dataloader(self) -> Any:
        raise OSError("no data")


@on_ranks(1)
def test_position_of_a_failed_run_is_forgotten(tmp_path: Path) -> None:
    """The run has loaded the checkpoint, and ended before its loader was set up."""
    preemption = Preemption(tmp_path, should_stop=lambda: run.global_step == 2)
    run = trainer(1, "weft", tmp_path, callbacks=[preemption])
    with pytest.raises(SystemExit):
        run.fit(Model(), loader())
    run = trainer(1, "weft", tmp_path)
    with pytest.raises(OSError, match="no data"):
        run.fit(WithoutData(), ckpt_path=preemption.last_checkpoint())
    assert run.strategy._loaders._positions
    model = Model()
    run.fit(model, loader())
    assert torch.equal(torch.stack(model.batches)[:4], _fixed_batches()[:4])


class Endless(Sampler[int]):
    """A sampler without a length."""

    def __iter__(self) -> Iterator[int]:
        return itertools.cycle(range(24))


class Twice(DataLoader[Any]):
    """Gives each batch twice."""

    def __iter__(self) -> Any:
        return (batch for batch in super().__iter__() for _ in range(2))


@on_ranks(1)
def test_loaders_that_cannot_resume_stay_as_they_are(tmp_path: Path) -> None:
    for data in (DataLoader(_data(), batch_size=4, sampler=Endless()), Twice(_data(), batch_size=4)):
        run = trainer(1, "weft", tmp_path, max_steps=3)
        run.fit(Model(), data)
        assert type(run.train_dataloader) is type(data)
        run.save_checkpoint(tmp_path / "last.ckpt")
        assert open_checkpoint(tmp_path / "last.ckpt").rest()["weft_loaders"] == [None]


def test_steps_with_other_numbers_of_samples_begin_with_the_first_batch() -> None:
    def made(batch_size: int, num_data_ranks: int) -> ResumableLoader:
        data_loader = make_resumable(DataLoader(_data(), batch_size=batch_size), num_data_ranks)
        assert isinstance(data_loader, ResumableLoader)
        return data_loader

    source = made(4, 2)
    batches = iter(source)
    for _ in range(3):
        next(batches)
    position = source.position(is_at_end=False, max_batches=2)
    assert position["num_batches"] == 2  # one was given ahead
    target = made(5, 1)
    reason = target.resume(position, lambda: None)
    assert reason == (
        "the checkpoint was saved within an epoch, with batch_size=4 on 2 data-parallel ranks, and this run has "
        "batch_size=5 on 1"
    )
    assert list(map(len, target)) == [5, 5, 5, 5, 4]
    target = made(8, 1)
    assert target.resume(position, lambda: None) is None
    assert torch.equal(torch.cat(list(target)), _data()[16:])
    assert list(map(len, target)) == [8, 8, 8]
    assert target.resume(source.position(is_at_end=True, max_batches=6), lambda: None) is None
    assert len(list(target)) == 3
    iter(target)
    assert copy.deepcopy(target)._weft_num_data_ranks == 1
