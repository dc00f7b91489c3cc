"""resume="auto": which checkpoint the first fit of a Trainer goes on from."""

from __future__ import annotations

import logging.handlers
import warnings
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning_plugin.scripts.plugin_models import (
    Model,
    assert_same_weights,
    loader,
    set_torchrun_environment,
    trainer,
    weights,
)
from lightning_utilities.core import rank_zero

from support.ranks import on_ranks
from weft.lightning import Preemption, WeftModelParallelStrategy

NUM_BATCHES = 6


def _fit(
    folder: Path | None, max_steps: int, rank: int, size: int, path: Any = None, **options: Any
) -> tuple[Any, Any]:
    """Train in batches of a fixed order; save to `folder` every second step."""
    set_torchrun_environment(rank, size)
    callbacks: list[Any] = [] if folder is None else [ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1)]
    strategy = WeftModelParallelStrategy(plan="auto", **{"resume": "auto", **options})
    model = Model()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Checkpoint directory .* exists")
        run = trainer(
            size,
            strategy,
            folder or ".",
            max_epochs=-1,
            max_steps=max_steps,
            enable_checkpointing=folder is not None,
            callbacks=callbacks,
        )
        run.fit(model, loader(), ckpt_path=path)
    return run, model


@on_ranks(1, 2)
def test_job_that_is_started_again_goes_on(rank: int, world_size: int, tmp_path: Path) -> None:
    _, undisturbed = _fit(None, 7, rank, world_size, resume=None)
    handler = logging.handlers.BufferingHandler(1000)
    rank_zero.log.addHandler(handler)
    try:
        _, first = _fit(tmp_path / "run", 5, rank, world_size)
        run, second = _fit(tmp_path / "run", 7, rank, world_size)
    finally:
        rank_zero.log.removeHandler(handler)
    output = "\n".join(record.getMessage() for record in handler.buffer)
    assert len(first.losses) == 5
    assert run.global_step == 7 and len(second.losses) == 3  # from step 4 on
    assert_same_weights(weights(second), weights(undisturbed))
    [newest] = (tmp_path / "run").glob("*step=4.ckpt")
    for sentence in (f"found no checkpoint in '{tmp_path / 'run'}'", f"training goes on from '{newest}'"):
        assert output.count(sentence) == (1 if rank == 0 else 0), output


@on_ranks(2)
def test_given_checkpoint_counts_if_it_is_of_a_later_step(rank: int, world_size: int, tmp_path: Path) -> None:
    _fit(tmp_path / "run", 2, rank, world_size)
    _fit(tmp_path / "longer", 4, rank, world_size)
    [longer] = (tmp_path / "longer").glob("*step=4.ckpt")
    [shorter] = (tmp_path / "longer").glob("*step=2.ckpt")
    _, model = _fit(tmp_path / "run", 5, rank, world_size, longer)
    assert len(model.losses) == 1  # its checkpoint of step 4 is in tmp_path / "run" only afterwards
    _, model = _fit(tmp_path / "none", 5, rank, world_size, shorter)
    assert len(model.losses) == 3
    _, model = _fit(tmp_path / "none", 5, rank, world_size, shorter)
    assert len(model.losses) == 1


@on_ranks(2)
def test_only_the_first_fit_resumes(rank: int, world_size: int, tmp_path: Path) -> None:
    run, model = _fit(tmp_path / "run", 3, rank, world_size)
    before = weights(model)
    run.validate(model, loader(), verbose=False)
    assert_same_weights(weights(model), before, rtol=0.0)
    run.fit_loop.epoch_loop.max_steps = 4
    run.fit(model, loader())
    assert run.global_step == 4 and len(model.losses) == 4  # the state of step 3, not the checkpoint of step 2
    model = Model()
    other = trainer(world_size, WeftModelParallelStrategy(plan="auto", resume="auto"), tmp_path / "run")
    other.validate(model, loader(), verbose=False)
    assert_same_weights(weights(model), weights(Model()), rtol=0.0)


@on_ranks(1)
def test_preemption_is_searched_too(tmp_path: Path) -> None:
    stopping = Preemption(tmp_path, should_stop=lambda: True, exit_code=75)
    strategy = WeftModelParallelStrategy(plan="auto", resume="auto")
    with pytest.raises(SystemExit):
        trainer(1, strategy, tmp_path, callbacks=[stopping]).fit(Model(), loader())
    going_on, model = Preemption(tmp_path), Model()
    strategy = WeftModelParallelStrategy(plan="auto", resume="auto")
    trainer(1, strategy, tmp_path, callbacks=[going_on]).fit(model, loader())
    assert len(model.losses) == NUM_BATCHES - 1


@on_ranks(2)
def test_refusals(rank: int, world_size: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no callback has a dirpath, without which each run saves to another folder"):
        _fit(None, 2, rank, world_size)
    with pytest.raises(ValueError, match="resume='auto' and save_distributed_checkpoint=False"):
        _fit(tmp_path, 2, rank, world_size, save_distributed_checkpoint=False)
    with pytest.raises(ValueError, match="resume='auto' without a plan"):
        WeftModelParallelStrategy(resume="auto")
    with pytest.raises(ValueError, match="resume='last'; pass 'auto'"):
        WeftModelParallelStrategy(plan="auto", resume="last")


class Failing(Model):
    """Fails in the hook `setup` if `fails` is set."""

    fails = True

    def setup(self, stage: str) -> None:
        if self.fails:
            raise RuntimeError("no data today")


@on_ranks(2)
def test_fit_that_fails_before_it_resumes(rank: int, world_size: int, tmp_path: Path) -> None:
    """Another call of the Trainer is not affected, and the next fit resumes."""
    _fit(tmp_path, 4, rank, world_size)
    options: dict[str, Any] = {"max_epochs": -1, "max_steps": 6, "enable_checkpointing": True}
    callbacks = [ModelCheckpoint(tmp_path, save_top_k=0)]
    strategy = WeftModelParallelStrategy(plan="auto", resume="auto")
    run = trainer(world_size, strategy, tmp_path, callbacks=callbacks, **options)
    model = Failing()
    with pytest.raises(RuntimeError, match="no data today"):
        run.fit(model, loader())
    model.fails = False
    run.validate(model, loader(), verbose=False)
    assert_same_weights(weights(model), weights(Model()), rtol=0.0)
    run.fit(model, loader())
    assert run.global_step == 6 and len(model.losses) == 2


class Restoring(Callback):
    """Restores a checkpoint before the Trainer does, as finders of learning rates and batch sizes do."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        trainer._checkpoint_connector.restore(self.path)
        self.step = trainer.global_step


@on_ranks(2)
def test_callback_that_restores_gets_its_checkpoint(rank: int, world_size: int, tmp_path: Path) -> None:
    _fit(tmp_path, 4, rank, world_size)
    [older] = tmp_path.glob("*step=2.ckpt")
    restoring = Restoring(older)
    callbacks = [restoring, ModelCheckpoint(tmp_path, save_top_k=0)]
    strategy = WeftModelParallelStrategy(plan="auto", resume="auto")
    options: dict[str, Any] = {"max_epochs": -1, "max_steps": 5, "enable_checkpointing": True}
    run, model = trainer(world_size, strategy, tmp_path, callbacks=callbacks, **options), Model()
    run.fit(model, loader())
    assert restoring.step == 2
    assert run.global_step == 5 and len(model.losses) == 1  # from step 4 on


@on_ranks(1)
def test_default_folder_is_refused_also_after_another_run(rank: int, world_size: int, tmp_path: Path) -> None:
    strategy = WeftModelParallelStrategy(plan="auto", resume="auto")
    run = trainer(1, strategy, tmp_path, callbacks=[ModelCheckpoint()], enable_checkpointing=True)
    run.validate(Model(), loader(), verbose=False)  # sets the dirpath
    with pytest.raises(ValueError, match="no callback has a dirpath"):
        run.fit(Model(), loader())


@on_ranks(2)
def test_damaged_ckpt_path_does_not_count(rank: int, world_size: int, tmp_path: Path) -> None:
    _fit(tmp_path / "run", 2, rank, world_size)
    _fit(tmp_path / "given", 4, rank, world_size)
    [given] = (tmp_path / "given").glob("*step=4.ckpt")
    if rank == 0:
        (given / "manifest.json").write_bytes((given / "manifest.json").read_bytes()[:-10])
    run, model = _fit(tmp_path / "run", 3, rank, world_size, given)
    assert run.global_step == 3 and len(model.losses) == 1
