"""Trainer and Fabric with async_save: what is on the disk and when, which saves wait, and errors."""

from __future__ import annotations

import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning_plugin.scripts.pipeline_models import Text, pipeline_strategy, text_loader
from lightning_plugin.scripts.plugin_models import (
    FeedForward,
    Model,
    assert_same_weights,
    loader,
    set_torchrun_environment,
    trainer,
    weights,
)

from support.processes import ProcessTree, assert_nothing_left, run_script
from support.ranks import on_ranks, run_on_ranks
from weft.lightning import Preemption, WeftModelParallelStrategy
from weft.lightning.fabric import WeftModelParallelStrategy as FabricStrategy
from weft.strategy import durable
from weft.strategy.checkpoint import background, open_checkpoint
from weft.strategy.checkpoint.writing import ChunkWriter

FULL = r"no space left"
SCRIPT = Path(__file__).parent / "scripts" / "save_and_exit.py"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(Path(__file__).parents[1])}


def _strategy(is_async: bool = True) -> WeftModelParallelStrategy:
    return WeftModelParallelStrategy(plan="auto", async_save=is_async)


def _fill_disk(patch: pytest.MonkeyPatch) -> None:
    def write(_: ChunkWriter) -> None:
        raise OSError("no space left")

    patch.setattr(ChunkWriter, "write", write)


class _Saves(Callback):
    """Counts the saves that are started in the background, and those whose checkpoint is there at once."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.paths: list[str] = []
        start = background.start

        def counted(path: Path, *rest: Any) -> tuple[str, ...]:
            self.paths.append(path.name)
            return start(path, *rest)

        patch.setattr(background, "start", counted)


@on_ranks(2)
def test_saves_in_the_background(rank: int, world_size: int, tmp_path: Path) -> None:
    """A save after each step, of which the newest and the last are kept, as without the option; training goes on."""
    set_torchrun_environment(rank, world_size)
    found = {}
    for is_async in (False, True):
        folder = tmp_path / str(is_async)
        keep = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=1, save_last=True)
        with pytest.MonkeyPatch.context() as patch:
            saves = _Saves(patch)
            run = trainer(world_size, _strategy(is_async), tmp_path, enable_checkpointing=True, callbacks=[keep])
            model = Model()
            run.fit(model, loader())
        assert len(saves.paths) == (12 if is_async else 0)
        dist.barrier()
        assert sorted(path.name for path in folder.iterdir()) == ["epoch=0-step=6.ckpt", "last.ckpt"]
        run = trainer(world_size, _strategy(False), tmp_path, max_epochs=2)
        resumed = Model(seed=99)
        run.fit(resumed, loader(), ckpt_path=keep.best_model_path)
        found[is_async] = (weights(model), weights(resumed))
    for one, other in zip(found[False], found[True], strict=True):
        assert_same_weights(one, other)


@on_ranks(2)
def test_the_old_checkpoint_stays_until_the_new_one_is_there(rank: int, world_size: int, tmp_path: Path) -> None:
    """A ModelCheckpoint that keeps one removes the old one right after it has started the save of the new one."""
    set_torchrun_environment(rank, world_size)
    may_publish = threading.Event()
    published: list[Path] = []
    found: list[list[str]] = []
    publish = durable.publish

    def wait_and_publish(partial: Path, path: Path) -> None:
        assert not published or may_publish.wait(60)
        published.append(path)
        publish(partial, path)

    class Look(Callback):
        def on_train_batch_start(self, run: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:  # after the second save
                dist.barrier()
                found.append([path.name for path in tmp_path.glob("*.ckpt")])
                dist.barrier()
                may_publish.set()

    callbacks = [ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=1), Look()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(durable, "publish", wait_and_publish)
        run = trainer(world_size, _strategy(), tmp_path, enable_checkpointing=True, callbacks=callbacks)
        run.fit(Model(), loader())
    dist.barrier()
    assert found == [["epoch=0-step=1.ckpt"]]
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["epoch=0-step=6.ckpt"]


@on_ranks(2)
def test_two_checkpoints_choose_different_names(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    callbacks = [ModelCheckpoint(tmp_path, "best", every_n_train_steps=1), ModelCheckpoint(tmp_path, "best")]
    run = trainer(
        world_size, _strategy(), tmp_path, enable_checkpointing=True, callbacks=callbacks, limit_train_batches=1
    )
    run.fit(Model(), loader())
    dist.barrier()
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["best-v1.ckpt", "best.ckpt"]
    assert [Path(each.best_model_path).name for each in callbacks] == ["best.ckpt", "best-v1.ckpt"]


class _Fails(Callback):
    def on_train_batch_start(self, run: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            raise ZeroDivisionError("in a step")


@on_ranks(2)
def test_saves_that_end_a_run_are_complete(rank: int, world_size: int, tmp_path: Path) -> None:
    """After an exception, at a warning of SLURM, after training, and with a link to the last checkpoint."""
    set_torchrun_environment(rank, world_size)
    with pytest.MonkeyPatch.context() as patch:
        saves = _Saves(patch)
        keep = ModelCheckpoint(tmp_path / "a", save_on_exception=True)
        run = trainer(world_size, _strategy(), tmp_path, enable_checkpointing=True, callbacks=[keep, _Fails()])
        with pytest.raises(ZeroDivisionError):
            run.fit(Model(), loader())
        assert len(list((tmp_path / "a").glob("*.ckpt"))) == 1 and not saves.paths

        class AtTheEnd(Callback):
            def on_fit_end(self, run: Any, module: Any) -> None:
                run.save_checkpoint(tmp_path / "end.ckpt")
                assert (tmp_path / "end.ckpt").exists()

        run = trainer(world_size, _strategy(), tmp_path, callbacks=[AtTheEnd()])
        run.fit(Model(), loader())
        assert not saves.paths
        keep = ModelCheckpoint(tmp_path / "b", every_n_train_steps=1, save_top_k=-1, save_last="link")
        run = trainer(world_size, _strategy(), tmp_path, enable_checkpointing=True, callbacks=[keep])
        run.fit(Model(), loader())
        run.save_checkpoint(tmp_path / "after.ckpt")
        assert (tmp_path / "after.ckpt").exists() and (tmp_path / "b" / "last.ckpt").exists() and not saves.paths

        class Warned(Callback):
            def on_train_batch_end(self, run: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
                if batch_idx == 1:
                    run.save_checkpoint(tmp_path / "hpc_ckpt_1.ckpt")
                    assert (tmp_path / "hpc_ckpt_1.ckpt").exists()
                    run.save_checkpoint(tmp_path / "other.ckpt")

        run = trainer(world_size, _strategy(), tmp_path, callbacks=[Warned()])
        run.fit(Model(), loader())
        assert saves.paths == ["other.ckpt"]
        assert background._process.copies.num_bytes == 0


@on_ranks(2)
def test_exception_waits_for_a_save_if_a_checkpoint_saves_on_exceptions(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    """ModelCheckpoint does not save again after the step that is being saved."""
    set_torchrun_environment(rank, world_size)
    publish = durable.publish

    def publish_late(partial: Path, path: Path) -> None:
        time.sleep(0.5)
        publish(partial, path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(durable, "publish", publish_late)
        keep = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_on_exception=True)
        run = trainer(world_size, _strategy(), tmp_path, enable_checkpointing=True, callbacks=[keep, _Fails()])
        with pytest.raises(ZeroDivisionError):
            run.fit(Model(), loader())
        assert rank > 0 or [path.name for path in tmp_path.glob("*.ckpt")] == ["epoch=0-step=1.ckpt"]
    run = trainer(world_size, _strategy(), tmp_path)
    run.fit(Model(), loader())  # waits for the save of the run before
    assert not background.is_writing(tmp_path / "epoch=0-step=1.ckpt")


def _train(rank: int, world_size: int, folder: str, layout: str, path: str | None) -> dict[str, Any]:
    """Save after the second step, and train on."""
    set_torchrun_environment(rank, world_size)
    if layout == "pp2":
        strategy = pipeline_strategy(layout, async_save=True)
    else:
        strategy = WeftModelParallelStrategy(plan="auto", zero_stage=1, layout=layout, async_save=True)
    model, data = (Text("adamw"), (text_loader(), text_loader(7))) if layout == "pp2" else (Model(), (loader(),))
    callbacks = [ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1)]
    run = trainer(world_size, strategy, folder, callbacks=callbacks, enable_checkpointing=True, max_steps=4)
    run.fit(model, *data, ckpt_path=path)
    dist.barrier()
    return weights(model)


@pytest.mark.parametrize("layout", ["dp2", "pp2"])
def test_shards_of_other_layouts_are_saved(tmp_path: Path, layout: str) -> None:
    """Replicated weights with sharded optimizer states, and stages: a resumed run ends like the one that saved."""
    expected = run_on_ranks(2, _train, folder=str(tmp_path / "a"), layout=layout, path=None)
    [path] = (tmp_path / "a").glob("*step=2.ckpt")
    found = run_on_ranks(2, _train, folder=str(tmp_path / "b"), layout=layout, path=str(path))
    for left, right in zip(expected, found, strict=True):
        assert_same_weights(left, right)


@on_ranks(2)
def test_error_of_a_save_is_raised_by_the_next_or_at_the_end(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    for every, expected in ((1, 2), (6, 6)):
        keep = ModelCheckpoint(tmp_path / str(every), every_n_train_steps=every)
        run = trainer(world_size, _strategy(), tmp_path, enable_checkpointing=True, callbacks=[keep])
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                _fill_disk(patch)
            with pytest.raises(OSError if rank == 1 else RuntimeError, match=FULL):
                run.fit(Model(), loader())
        assert run.global_step == expected
        run.save_checkpoint(tmp_path / f"{every}.ckpt")  # the failed save hinders no other
        dist.barrier()
        assert [path.name for path in (tmp_path / str(every)).glob("*.ckpt")] == []
        assert (tmp_path / f"{every}.ckpt").exists()


@on_ranks(2)
def test_preemption_saves_after_a_failed_save(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    with pytest.MonkeyPatch.context() as patch:

        class Save(Callback):
            def on_train_batch_end(self, run: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
                if rank == 1:
                    _fill_disk(patch)
                run.save_checkpoint(tmp_path / "full.ckpt")
                background._process.current._thread.join()
                patch.undo()
                signal.raise_signal(signal.SIGUSR1)

        callbacks = [Save(), Preemption(tmp_path)]
        run = trainer(world_size, _strategy(), tmp_path, callbacks=callbacks)
        with pytest.warns(UserWarning, match=FULL), pytest.raises(SystemExit):
            run.fit(Model(), loader())
    dist.barrier()
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["preempted.ckpt"]
    assert open_checkpoint(tmp_path / "preempted.ckpt").rest()["global_step"] == 1


@on_ranks(2)
def test_fabric_saves_in_the_background(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    strategy = FabricStrategy(plan="auto", async_save=True)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    model = fabric.setup(FeedForward())
    fabric.save(tmp_path / "last.ckpt", {"model": model, "step": 1})
    before = {name: tensor.full_tensor().clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state = {"model": model, "step": 0}
    fabric.load(tmp_path / "last.ckpt", state)  # waits for the save
    assert state["step"] == 1
    assert all(torch.equal(tensor.full_tensor(), before[name]) for name, tensor in model.state_dict().items())
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            _fill_disk(patch)
        fabric.save(tmp_path / "last.ckpt", {"model": model, "step": 2})
        with pytest.raises((OSError, RuntimeError), match=FULL):
            strategy.wait_for_checkpoints()
    fabric.load(tmp_path / "last.ckpt", state)
    assert state["step"] == 1


@pytest.mark.parametrize("failing", [-1, 0, 1])
def test_exit_of_a_process_waits_for_its_save(tmp_path: Path, failing: int) -> None:
    path = tmp_path / "last.ckpt"
    with ProcessTree([sys.executable, SCRIPT, path, str(failing)], env=ENVIRONMENT, warm_processes=2) as tree:
        result = tree.wait(60.0)
        assert_nothing_left(tree.pgid, within=5.0)
    assert result.returncode == (0 if failing < 0 else 1), result.stderr
    assert path.exists() == (failing < 0)
    assert result.stdout.count("ended") == 2
    assert result.stderr.count("OSError: no space left\n") == (0 if failing < 0 else 1), result.stderr


def test_executors_run_until_a_save_is_complete() -> None:
    """asyncio, which writes to object stores, needs an executor for names of hosts; a failed run does not wait."""
    for argument, output in (("end", "7"), ("fail", "")):
        result = run_script(SCRIPT.with_name("executor_at_exit.py"), argument, warm_processes=1)
        assert result.stdout.strip() == output, result.stderr
