"""Checkpoints: saved at 1, 2 and 4 ranks, resumed at 1, 2 and 4, as directories and files, and loaded without weft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.fabric import Fabric
from lightning_plugin.scripts.plugin_models import (
    FeedForward,
    Model,
    assert_same_weights,
    loader,
    set_torchrun_environment,
    trainer,
    weights,
)

from support.ranks import on_ranks, run_on_ranks
from weft._plugin import checkpoint as checkpoints
from weft.lightning import WeftModelParallelStrategy, consolidate_checkpoint
from weft.lightning.fabric import WeftModelParallelStrategy as FabricStrategy
from weft.strategy import durable
from weft.strategy.checkpoint import Location, open_checkpoint

SIZES = (1, 2, 4)
FORMATS = ("directory", "file")


def _strategy(fmt: str) -> WeftModelParallelStrategy:
    return WeftModelParallelStrategy(plan="auto", save_distributed_checkpoint=fmt != "file")


def _save_as_before(where: Location, state: dict[str, Any], rest: dict[str, Any], about: object) -> tuple[str, ...]:
    """Write a directory as weft 0.1 did."""
    directory = Path(str(where))
    dcp.save(state, checkpoint_id=directory)
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save(rest, directory / "meta.pt")
    return ()


def _save(rank: int, world_size: int, folder: str, optimizer: str, num_steps: int) -> None:
    """Train `num_steps` steps, then save in both formats as FORMAT-WORLD_SIZE.ckpt; 2 ranks also as weft 0.1 did."""
    set_torchrun_environment(rank, world_size)
    model = Model(optimizer=optimizer)
    for fmt in (*FORMATS, "old") if world_size == 2 else FORMATS:
        run = trainer(world_size, _strategy(fmt), folder, max_steps=num_steps)
        model = Model(optimizer=optimizer)
        run.fit(model, loader())
        with pytest.MonkeyPatch.context() as patch:
            if fmt == "old":
                patch.setattr(checkpoints.directories, "save", _save_as_before)
            run.save_checkpoint(Path(folder, f"{fmt}-{world_size}.ckpt"))


def _resume(rank: int, world_size: int, names: list[str], folder: str, optimizer: str) -> dict[str, Any]:
    """Resume each checkpoint to the end of the epoch; return {name: (steps taken, weights)}."""
    set_torchrun_environment(rank, world_size)
    results = {}
    for name in names:
        model = Model(optimizer=optimizer, seed=99)
        run = trainer(world_size, _strategy("directory"), folder, max_epochs=2)
        run.fit(model, loader(), ckpt_path=Path(folder, name))
        results[name] = (len(model.losses), weights(model))
    return results


@on_ranks(2)
def test_interrupted_exchange_is_completed(rank: int, world_size: int, tmp_path: Path) -> None:
    """A crash between two renames, on a file system that cannot exchange names, leaves the old one under another."""
    set_torchrun_environment(rank, world_size)
    path = tmp_path / "last.ckpt"
    hidden = durable._beside(path, "previous")
    model, run = Model(), trainer(world_size, _strategy("directory"), tmp_path)
    run.fit(model, loader())
    run.save_checkpoint(path)
    if rank == 0:
        path.rename(hidden)
        consolidate_checkpoint(path)
        assert sorted(each.name for each in tmp_path.iterdir()) == [hidden.name, "last.ckpt.consolidated"]
    dist.barrier()
    resumed, again = Model(seed=99), trainer(world_size, _strategy("directory"), tmp_path)
    again.fit(resumed, loader(), ckpt_path=path)
    assert_same_weights(weights(resumed), weights(model))
    assert hidden.exists() and not path.exists(), "reading changes nothing"
    again.save_checkpoint(path)
    assert path.is_dir() and not hidden.exists()


@on_ranks(2)
def test_fabric_finds_checkpoint_after_an_interrupted_exchange(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    path = tmp_path / "last.ckpt"
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=FabricStrategy(plan="auto"))
    fabric.launch()
    first, second = fabric.setup(FeedForward()), fabric.setup(FeedForward())
    fabric.save(path, {"model": first})
    if rank == 0:
        path.rename(durable._beside(path, "previous"))
    dist.barrier()
    fabric.load(path, {"model": second})
    assert_same_weights(weights(second), weights(first))


def _train_uninterrupted(rank: int, world_size: int, folder: str, optimizer: str) -> dict[str, torch.Tensor]:
    set_torchrun_environment(rank, world_size)
    model = Model(optimizer=optimizer)
    trainer(world_size, "auto", folder, max_epochs=2).fit(model, loader())
    return weights(model)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_resumes_at_any_world_size(tmp_path: Path, optimizer: str) -> None:
    folder = str(tmp_path)
    [expected] = run_on_ranks(1, _train_uninterrupted, folder=folder, optimizer=optimizer)
    for world_size in SIZES:
        run_on_ranks(world_size, _save, folder=folder, optimizer=optimizer, num_steps=6)
    names = [f"{fmt}-{size}.ckpt" for fmt in FORMATS for size in SIZES] + ["old-2.ckpt"]
    for world_size in SIZES:
        for results in run_on_ranks(world_size, _resume, names=names, folder=folder, optimizer=optimizer):
            for name in names:
                num_steps, resumed = results[name]
                assert num_steps == 6, f"{name} at {world_size} ranks"
                assert_same_weights(resumed, expected)


def _load_without_weft(rank: int, world_size: int, files: list[str], folder: str, optimizer: str) -> dict[str, Any]:
    set_torchrun_environment(rank, world_size)
    results = {}
    for file in files:
        model = Model(seed=99, optimizer=optimizer)
        trainer(1, "auto", folder, max_epochs=2).fit(model, loader(), ckpt_path=file)
        loaded = Model.load_from_checkpoint(file)
        results[file] = (weights(model), weights(loaded))
    return results


def _consolidate(rank: int, folder: str) -> str | None:
    """Consolidate on one rank; the call is not collective."""
    return str(consolidate_checkpoint(Path(folder, "directory-2.ckpt"))) if rank == 1 else None


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_loads_without_weft(tmp_path: Path, optimizer: str) -> None:
    folder = str(tmp_path)
    run_on_ranks(2, _save, folder=folder, optimizer=optimizer, num_steps=6)
    _, by_function = run_on_ranks(2, _consolidate, folder=folder)
    assert by_function == f"{folder}/directory-2.ckpt.consolidated"
    with pytest.raises(IsADirectoryError):  # as docs/checkpoints.md says about directories
        Model.load_from_checkpoint(tmp_path / "directory-2.ckpt")
    [expected] = run_on_ranks(1, _train_uninterrupted, folder=folder, optimizer=optimizer)
    saved = torch.load(tmp_path / "file-2.ckpt", weights_only=False)["state_dict"]
    files = [str(tmp_path / "file-2.ckpt"), by_function]
    [results] = run_on_ranks(1, _load_without_weft, files=files, folder=folder, optimizer=optimizer)
    for file in files:
        resumed, loaded = results[file]
        assert_same_weights(resumed, expected)
        assert_same_weights(loaded, {name: saved[name] for name in loaded})


def _save_before_first_step(rank: int, world_size: int, folder: str) -> None:
    set_torchrun_environment(rank, world_size)
    for fmt in FORMATS:
        model = Model()
        model.on_train_start = lambda f=fmt, m=model: m.trainer.save_checkpoint(Path(folder, f"{f}-0.ckpt"))
        run = trainer(world_size, _strategy(fmt), folder)
        run.fit(model, loader())
        assert {int(s["step"]) for s in run.optimizers[0].state.values()} == {6}, "saving took a step"


def test_checkpoint_of_step_zero_resumes(tmp_path: Path) -> None:
    folder = str(tmp_path)
    run_on_ranks(2, _save_before_first_step, folder=folder)
    [expected] = run_on_ranks(1, _train_uninterrupted, folder=folder, optimizer="adamw")
    names = [f"{fmt}-0.ckpt" for fmt in FORMATS]
    for world_size in (1, 2):
        for results in run_on_ranks(world_size, _resume, names=names, folder=folder, optimizer="adamw"):
            for name in names:
                num_steps, resumed = results[name]
                assert num_steps == 12
                assert_same_weights(resumed, expected)


@on_ranks(2)
def test_weights_only_checkpoint_raises(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    for fmt in FORMATS:
        run = trainer(world_size, _strategy(fmt), tmp_path, max_steps=1)
        run.fit(Model(), loader())
        run.save_checkpoint(tmp_path / f"{fmt}.ckpt", weights_only=True)
        with pytest.raises(KeyError, match="no state of optimizer 0"):
            trainer(world_size, _strategy(fmt), tmp_path).fit(Model(), loader(), ckpt_path=tmp_path / f"{fmt}.ckpt")
        trainer(world_size, _strategy(fmt), tmp_path).test(
            Model(), loader(), ckpt_path=tmp_path / f"{fmt}.ckpt", verbose=False
        )


@on_ranks(2)
def test_file_replaces_directory_and_directory_file(rank: int, world_size: int, tmp_path: Path) -> None:
    """Lightning writes files; into a directory of weft it would write its own beside the manifest."""
    set_torchrun_environment(rank, world_size)
    path = tmp_path / "last.ckpt"
    for fmt in ("directory", "file", "directory"):
        run = trainer(world_size, _strategy(fmt), tmp_path, max_steps=1)
        run.fit(Model(), loader())
        run.save_checkpoint(path)
        dist.barrier()
        assert path.is_dir() == (fmt == "directory") and path.exists()
        trainer(world_size, _strategy(fmt), tmp_path, max_steps=2).fit(Model(), loader(), ckpt_path=path)


@on_ranks(2)
def test_directory_that_is_no_checkpoint_raises(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    run = trainer(world_size, _strategy("directory"), tmp_path, max_steps=1)
    (tmp_path / "data").mkdir(exist_ok=True)
    with pytest.raises(FileNotFoundError, match=r"data', which has neither manifest.json nor .metadata; pass the"):
        run.fit(Model(), loader(), ckpt_path=tmp_path / "data")


@on_ranks(1)
def test_consolidate_errors(tmp_path: Path) -> None:
    def write(name: str, models: dict[str, Any]) -> Path:
        checkpoints.write_directory(models, {}, {}, tmp_path / name)
        return tmp_path / name

    with pytest.raises(ValueError, match=r"none', which is not a directory of shards; pass the path that"):
        consolidate_checkpoint(tmp_path / "none")
    with pytest.raises(ValueError, match=r"which has net and no LightningModule's state_dict; pass a checkpoint"):
        consolidate_checkpoint(write("fabric", {"net": {"weight": torch.ones(2)}}))
    trainers = write("trainer", {"model": {"weight": torch.arange(2)}})
    file = consolidate_checkpoint(trainers, tmp_path / "file")
    assert torch.load(file)["state_dict"]["weight"].tolist() == [0, 1]
    with pytest.raises(FileExistsError, match="which exists; remove it, or pass another file"):
        consolidate_checkpoint(trainers, tmp_path / "file")


@on_ranks(1)
def test_directory_hint_is_logged_once(rank: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, 1)
    log_lines: list[str] = []
    for fmt in FORMATS:
        strategy = _strategy(fmt)
        strategy._engine.console.log = log_lines.append
        run = trainer(1, strategy, tmp_path, max_steps=1)
        run.fit(Model(), loader())
        for _ in range(2):
            run.save_checkpoint(tmp_path / f"{fmt}.ckpt")
    assert [
        "weft.lightning.consolidate_checkpoint(directory)" in text for text in log_lines if "checkpoint" in text
    ] == [True]


class _Unwritable:
    def __reduce__(self) -> tuple[Any, ...]:
        raise OSError("no space left")


@on_ranks(1)
def test_failed_save_keeps_previous_directory(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    model = {"weight": torch.ones(2)}

    def write(rest: dict[str, Any]) -> None:
        checkpoints.write_directory({"model": model}, {}, rest, path)

    write({"epoch": 1})
    with pytest.raises(OSError, match="no space left"):
        write({"epoch": _Unwritable()})
    assert open_checkpoint(path).rest() == {"epoch": 1}
    write({"epoch": 2})
    assert open_checkpoint(path).rest() == {"epoch": 2}
    assert [entry.name for entry in tmp_path.iterdir()] == ["last.ckpt"]
    (tmp_path / "data").mkdir()
    with pytest.raises(IsADirectoryError, match="remove it"):
        checkpoints.check_checkpoint_path(tmp_path / "data")
