"""The Trainer's checkpoints of one file: durable, errors on all ranks, and a CheckpointIO of the user."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning_plugin.scripts.plugin_models import Model, loader, set_torchrun_environment, trainer

from support.ranks import on_ranks
from weft.lightning import WeftModelParallelStrategy
from weft.strategy import durable


class OwnIO(TorchCheckpointIO):
    """Counts its saves."""

    num_saves = 0

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        self.num_saves += 1
        super().save_checkpoint(checkpoint, path, storage_options)


def _fitted(rank: int, size: int, folder: Path, **options: Any) -> Any:
    set_torchrun_environment(rank, size)
    plugins = options.pop("plugins", None)
    strategy = WeftModelParallelStrategy(plan="auto", **options)
    run = trainer(size, strategy, folder, max_steps=1, plugins=plugins)
    run.fit(Model(), loader())
    return run


@on_ranks(2)
def test_file_replaces_a_checkpoint_when_it_is_on_the_disk(rank: int, world_size: int, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    _fitted(rank, world_size, tmp_path).save_checkpoint(path)
    run = _fitted(rank, world_size, tmp_path, save_distributed_checkpoint=False)
    calls: list[str] = []

    def fail_in_exchange(name: str) -> None:
        calls.append(name)
        if name == "exchange":
            raise OSError("no exchange today")

    durable.before_call = fail_in_exchange
    try:
        with pytest.raises(OSError if rank == 0 else RuntimeError, match="no exchange today"):
            run.save_checkpoint(path)
        assert calls[:1] == (["open"] if rank == 0 else []) and path.is_dir()
        durable.before_call = calls.append
        run.save_checkpoint(f"file://{path}")
    finally:
        durable.before_call = None
    run.strategy.barrier()
    if rank == 0:
        assert calls.index("fsync") < calls.index("exchange") and [each.name for each in tmp_path.iterdir()] == [
            path.name
        ]
    assert torch.load(path, weights_only=False)["state_dict"].keys() == Model().state_dict().keys()


@on_ranks(2)
def test_checkpoint_io_of_the_user_writes(rank: int, world_size: int, tmp_path: Path) -> None:
    own = OwnIO()
    run = _fitted(rank, world_size, tmp_path, save_distributed_checkpoint=False, plugins=[own])
    run.save_checkpoint(tmp_path / "last.ckpt")
    assert own.num_saves == (1 if rank == 0 else 0) and (tmp_path / "last.ckpt").is_file()


@on_ranks(2)
def test_directory_that_is_no_checkpoint_is_refused(rank: int, world_size: int, tmp_path: Path) -> None:
    run = _fitted(rank, world_size, tmp_path, save_distributed_checkpoint=False)
    (tmp_path / "data").mkdir(exist_ok=True)
    (tmp_path / "data" / "samples.txt").touch()
    run.strategy.barrier()
    with pytest.raises(IsADirectoryError, match="is a directory; pass another path, or remove it"):
        run.save_checkpoint(tmp_path / "data")
    assert (tmp_path / "data" / "samples.txt").exists()
