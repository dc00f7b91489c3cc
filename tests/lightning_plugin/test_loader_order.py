"""Samples keep the loader's order with one data replica; with several, Lightning's sampler sets the order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric import Fabric
from lightning_plugin.scripts.plugin_models import (
    BATCH,
    NUM_BATCHES,
    FeedForward,
    Model,
    fixed_data,
    loader,
    set_torchrun_environment,
    trainer,
)
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, Sampler

from support.ranks import on_ranks, run_on_ranks
from weft._plugin.console import Console
from weft.lightning.fabric import WeftModelParallelStrategy as FabricStrategy

BACKWARDS = range(BATCH * NUM_BATCHES - 1, -1, -1)


class PairsOfDistance(Sampler):
    """A batch sampler into which Lightning cannot inject another sampler."""

    def __init__(self, distance: int) -> None:
        self.distance = distance

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[i, i + self.distance] for i in range(5)])

    def __len__(self) -> int:
        return 5


def loaders() -> dict[str, DataLoader]:
    return {
        "in order": loader(),
        "sampler": loader(sampler=BACKWARDS),
        "batch sampler": DataLoader(fixed_data(), batch_sampler=PairsOfDistance(3)),
        "generator": loader(shuffle=True, generator=torch.Generator().manual_seed(3)),
    }


@on_ranks(1, 2)
def test_one_replica_keeps_loader(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    for name, mine in loaders().items():
        run = trainer(world_size, "weft", tmp_path, use_distributed_sampler=True)
        run.fit(model := Model(), mine, mine)
        expected = list(loaders()[name])
        assert torch.equal(torch.cat(model.batches), torch.cat(expected)), name
        assert run.train_dataloader.dataset is mine.dataset and run.train_dataloader.batch_sampler is mine.batch_sampler
        assert run.val_dataloaders is mine


def _shuffled(rank: int, world_size: int, folder: str, strategy: str) -> Tensor:
    set_torchrun_environment(rank, world_size)
    model = Model(dropout=0.5)
    L.seed_everything(5, verbose=False)  # strategies of several ranks begin a run with this seed
    run = trainer(world_size, strategy, folder, max_epochs=2, use_distributed_sampler=True)
    run.fit(model, loader(shuffle=True))
    return torch.cat(model.batches)


def test_one_replica_shuffles_as_one_device(tmp_path: Path) -> None:
    [expected] = run_on_ranks(1, _shuffled, folder=str(tmp_path), strategy="auto")
    first, second = expected.chunk(2)
    assert not torch.equal(first, second)
    for result in run_on_ranks(2, _shuffled, folder=str(tmp_path), strategy="weft"):
        assert torch.equal(result, expected)


@on_ranks(2)
def test_different_shuffles_raise(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    model = Model()
    model.on_train_epoch_end = lambda: torch.rand(()) if rank == 0 else None
    run = trainer(world_size, "weft", tmp_path, max_epochs=2, use_distributed_sampler=True)
    with pytest.raises(ValueError, match=f"training batch {NUM_BATCHES} differs between rank 0 and rank 1"):
        run.fit(model, loader(shuffle=True))
    assert len(model.losses) == NUM_BATCHES

    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=FabricStrategy(plan="auto"))
    fabric.launch()
    module, mine = fabric.setup(FeedForward()), fabric.setup_dataloaders(loader(shuffle=True))
    for batch in mine:
        module(batch)
    if rank == 0:
        torch.rand(())
    with pytest.raises(ValueError, match=f"training batch {NUM_BATCHES} differs between rank 0 and rank 1"):
        module(next(iter(mine)))


@on_ranks(2)
def test_several_replicas_shuffle_and_log(
    rank: int, world_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_torchrun_environment(rank, world_size)
    log_lines: list[str] = []
    monkeypatch.setattr(Console, "log", lambda self, text: log_lines.append(text))
    run = trainer(world_size, "weft_fsdp", tmp_path, use_distributed_sampler=True)
    for epochs in (1, 2):
        run.fit_loop.max_epochs = epochs
        run.fit(model := Model(), loader())
        seen = torch.cat(model.batches)
        assert len(seen) == BATCH * NUM_BATCHES // 2
        assert not torch.equal(seen, fixed_data()[rank::2])
    [line] = [text for text in log_lines if "shuffles" in text]
    assert "splits the training data over 2 data-parallel ranks" in line
    log_lines.clear()
    sampler = DistributedSampler(fixed_data(), num_replicas=2, rank=rank, shuffle=False)
    run = trainer(world_size, "weft_fsdp", tmp_path, use_distributed_sampler=True)
    run.fit(model := Model(), loader(sampler=sampler))
    assert torch.equal(torch.cat(model.batches), fixed_data()[rank::2])
    assert not [text for text in log_lines if "shuffles" in text]


@on_ranks(2)
@pytest.mark.parametrize("layout", ["tp2", "dp2"])
def test_fabric_never_shuffles(rank: int, world_size: int, layout: str) -> None:
    set_torchrun_environment(rank, world_size)
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=FabricStrategy(plan="auto", layout=layout))
    fabric.launch()
    if layout == "tp2":
        for name, mine in loaders().items():
            assert torch.equal(torch.cat(list(fabric.setup_dataloaders(mine))), torch.cat(list(loaders()[name]))), name
        return
    seen: Any = torch.cat(list(fabric.setup_dataloaders(loader())))
    assert torch.equal(seen, fixed_data()[rank::2])
