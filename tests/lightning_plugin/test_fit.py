"""The Trainer with weft on 1, 2 and 4 ranks: parity with one device, and objects that stay usable after a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning_plugin.scripts.plugin_models import (
    Model,
    assert_same_weights,
    loader,
    set_torchrun_environment,
    trainer,
    weights,
)
from torch.distributed.tensor import DTensor

from support.ranks import on_ranks, run_on_ranks
from weft.lightning import WeftModelParallelStrategy

SPLIT_PLAN = {"feed_forward.w1": "column", "feed_forward.w3": "column", "feed_forward.w2": "row"}


def _run_all_loops(rank: int, world_size: int, folder: str, strategy: Any, clip: float | None) -> dict[str, Any]:
    """Fit, validate, test, predict and fit again; return the results."""
    set_torchrun_environment(rank, world_size)
    if isinstance(strategy, dict):
        strategy = WeftModelParallelStrategy(**strategy)
    model = Model()
    run = trainer(world_size, strategy, folder, gradient_clip_val=clip)
    run.fit(model, loader(), loader())
    fitted = weights(model)
    validated = run.validate(model, loader(), verbose=False)
    tested = run.test(model, loader(), verbose=False)
    predicted = torch.cat(run.predict(model, loader()))
    run.fit_loop.max_epochs = 2
    run.fit(model, loader())
    return {
        "losses": model.losses,
        "fitted": fitted,
        "refitted": weights(model),
        "validated": validated[0]["val_loss"],
        "tested": tested[0]["test_loss"],
        "predicted": predicted,
        "steps": run.global_step,
        "sharded": isinstance(model.feed_forward.w1.weight, DTensor),
    }


@pytest.mark.parametrize("clip", [None, 0.05], ids=["unclipped", "clipped"])
def test_matches_one_device(tmp_path: Path, clip: float | None) -> None:
    [expected] = run_on_ranks(1, _run_all_loops, folder=str(tmp_path), strategy="auto", clip=clip)
    assert not expected["sharded"]
    assert expected["steps"] == 12
    for world_size, strategy in ((1, "weft"), (2, "weft_tp"), (2, {"plan": SPLIT_PLAN}), (4, "weft")):
        for result in run_on_ranks(world_size, _run_all_loops, folder=str(tmp_path), strategy=strategy, clip=clip):
            assert result["sharded"], strategy
            torch.testing.assert_close(result["losses"], expected["losses"], rtol=1e-10, atol=0)
            assert_same_weights(result["fitted"], expected["fitted"])
            assert_same_weights(result["refitted"], expected["refitted"])
            for name in ("validated", "tested", "predicted"):
                torch.testing.assert_close(result[name], expected[name], rtol=1e-10, atol=1e-12)
            assert result["steps"] == expected["steps"]


@on_ranks(2)
def test_callbacks_and_logger_act_as_on_one_device(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    keep_best = ModelCheckpoint(dirpath=tmp_path / "best", monitor="val_loss", save_last=True)
    stop = EarlyStopping("val_loss", mode="max", patience=1)  # stops after the second epoch, as the loss falls
    run = trainer(
        world_size,
        "weft",
        tmp_path,
        max_epochs=5,
        callbacks=[keep_best, stop],
        enable_checkpointing=True,
        logger=CSVLogger(tmp_path, name="csv"),
        log_every_n_steps=1,
    )
    run.fit(Model(), loader(), loader())
    assert run.current_epoch == 2
    assert (Path(keep_best.best_model_path) / "manifest.json").is_file()
    assert (tmp_path / "best" / "last.ckpt" / "manifest.json").is_file()
    metrics = (tmp_path / "csv" / "version_0" / "metrics.csv").read_text()
    assert "val_loss" in metrics.splitlines()[0]
    run.test(Model(), loader(), ckpt_path=keep_best.best_model_path, verbose=False)


@on_ranks(2)
def test_group_mesh_and_weights_outlive_run(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    strategy = WeftModelParallelStrategy(plan="auto")
    run, model = trainer(world_size, strategy, tmp_path), Model()
    run.fit(model, loader())
    mesh, weight = strategy.device_mesh, model.feed_forward.w1.weight
    assert strategy.tensor_parallel_group.size() == world_size
    assert model.state_dict()["feed_forward.w1.weight"].full_tensor().shape == weight.shape
    run.save_checkpoint(tmp_path / "after.ckpt")
    run.test(model, loader(), verbose=False)
    assert strategy.device_mesh is mesh
    assert model.feed_forward.w1.weight is weight

    second = WeftModelParallelStrategy(plan="auto")
    trainer(world_size, second, tmp_path).test(model, loader(), verbose=False)
    assert second.device_mesh is mesh
    assert model.feed_forward.w1.weight is weight
    with pytest.raises(ValueError, match="another plan"):
        trainer(world_size, WeftModelParallelStrategy(plan=SPLIT_PLAN), tmp_path).fit(model, loader())


@on_ranks(2)
def test_evaluation_never_uses_inference_mode(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    run = trainer(world_size, "weft", tmp_path)
    inference_modes = []
    model = Model()
    model.predict_step = lambda batch, batch_idx: inference_modes.append(torch.is_inference_mode_enabled())
    # Lightning uses inference mode unless the backend is named "gloo"; DTensors do not support inference mode.
    torch_backend, torch.distributed.get_backend = torch.distributed.get_backend, lambda *_: "cpu:gloo"
    try:
        run.predict(model, loader())
    finally:
        torch.distributed.get_backend = torch_backend
    assert inference_modes == [False] * len(loader())


@on_ranks(2)
def test_sampler_follows_the_data_axis(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    strategy = WeftModelParallelStrategy(plan="auto")
    run, model = trainer(world_size, strategy, tmp_path, use_distributed_sampler=True), Model()
    run.fit(model, loader())
    assert strategy.distributed_sampler_kwargs == {"num_replicas": 1, "rank": 0}
    assert len(model.batches) == len(loader())
