"""Callbacks that monitor values of the last stage, and checkpoints that resume on other numbers of stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning_plugin.scripts.pipeline_models import CUTS, Text, pipeline_strategy, text_loader
from lightning_plugin.scripts.plugin_models import set_torchrun_environment, trainer, weights
from torch import Tensor

from support.ranks import run_on_ranks


def strategy_of(layout: str) -> Any:
    """Return the strategy of a layout, such as "pp4", or of a layout and a V-shaped schedule, such as "pp2 zbv"."""
    sizes, _, schedule = layout.partition(" ")
    options = {"pipeline_cuts": CUTS[2 * int(sizes[2])], "pipeline_schedule": schedule} if schedule else {}
    return pipeline_strategy(sizes, **options)


class Improving(Text):
    """Its validation loss is lowest in epochs 1 and 2."""

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        loss, _ = self.loss(batch)
        self.log("val_loss", loss * 0 + abs(self.current_epoch - 1.5))


def train_with_callbacks(rank: int, world_size: int, folder: str, strategy: Any) -> dict[str, Any]:
    set_torchrun_environment(rank, world_size)
    best = ModelCheckpoint(dirpath=Path(folder) / str(world_size), monitor="val_loss", save_last=True)
    stop = EarlyStopping("val_loss", patience=2)
    strategy = strategy if strategy == "auto" else strategy_of(strategy)
    run = trainer(
        world_size,
        strategy,
        folder,
        max_epochs=9,
        callbacks=[best, stop],
        enable_checkpointing=True,
    )
    model = Improving(optimizer="adamw")
    run.fit(model, text_loader(), text_loader(7))
    name = Path(best.best_model_path).name
    return {"epoch": run.current_epoch, "best": name, "lr": [g["lr"] for g in run.optimizers[0].param_groups]}


def test_callbacks_on_validation_metric_match_one_device(tmp_path: Path) -> None:
    [expected] = run_on_ranks(1, train_with_callbacks, folder=str(tmp_path), strategy="auto")
    assert expected["epoch"] == 4 and expected["lr"][0] < 1e-2
    for strategy in ("pp2", "pp2 zbv"):
        found = run_on_ranks(2, train_with_callbacks, folder=str(tmp_path / strategy), strategy=strategy)
        assert found == [expected, expected]


def fit_two_epochs(world_size: int, folder: Path, layout: str, **options: Any) -> tuple[L.Trainer, Text]:
    strategy: Any = "auto" if layout == "auto" else strategy_of(layout)
    run, model = trainer(world_size, strategy, folder, max_epochs=2), Text("adamw")
    run.fit(model, text_loader(), text_loader(7), **options)
    return run, model


def train_one_device(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    set_torchrun_environment(rank, world_size)
    run, model = trainer(1, "auto", folder), Text("adamw")
    run.fit(model, text_loader(), text_loader(7))
    run.save_checkpoint(Path(folder) / "one.ckpt")
    run, model = fit_two_epochs(1, Path(folder), "auto")
    return {"weights": weights(model), "losses": model.losses[3:]}


def train_and_resume(
    rank: int, world_size: int, folder: str, layouts: list[str | Path], source: str | None
) -> dict[str, Any]:
    """Train one epoch in the first layout, and resume for the second epoch in each other layout; return the results.

    source: a checkpoint that replaces the first epoch.
    """
    set_torchrun_environment(rank, world_size)
    first, *others = layouts
    path = Path(folder) / (source or f"{first}.ckpt")
    if source is None:
        run, model = trainer(world_size, strategy_of(first), folder), Text("adamw")
        run.fit(model, text_loader(), text_loader(7))
        run.save_checkpoint(path)
    results = {}
    for layout in others:
        _, model = fit_two_epochs(world_size, Path(folder), layout, ckpt_path=path)
        results[layout] = {"weights": weights(model), "losses": model.losses}
    return results


def test_resumes_on_other_stage_counts(tmp_path: Path) -> None:
    [expected] = run_on_ranks(1, train_one_device, folder=str(tmp_path))
    found = run_on_ranks(4, train_and_resume, folder=str(tmp_path), layouts=["pp2,tp2", "pp4", "pp2,tp2"], source=None)
    found += run_on_ranks(2, train_and_resume, folder=str(tmp_path), layouts=["", "pp2"], source="one.ckpt")
    assert_same_results(found, expected)


def test_resumes_under_other_schedules(tmp_path: Path) -> None:
    """In a V, rank 0 has the first and the last layers, and one tied weight under two names."""
    [expected] = run_on_ranks(1, train_one_device, folder=str(tmp_path))
    found = run_on_ranks(
        2, train_and_resume, folder=str(tmp_path), layouts=["pp2 zbv", "pp2", "pp2 v_min", "pp2 zbv"], source=None
    )
    layouts = ["pp2", "pp2 zbv", "pp2 dualpipev", "pp2 v_half"]
    found += run_on_ranks(2, train_and_resume, folder=str(tmp_path), layouts=layouts, source=None)
    found += run_on_ranks(2, train_and_resume, folder=str(tmp_path), layouts=["", "pp2 zbv"], source="one.ckpt")
    assert len(found) == 6
    assert_same_results(found, expected)


def assert_same_results(found: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    for results in found:
        for result in results.values():
            torch.testing.assert_close(result["losses"], expected["losses"], rtol=1e-10, atol=0)
            for name, value in result["weights"].items():
                original = expected["weights"][name.replace("output", "tok_embeddings")]
                torch.testing.assert_close(value, original, rtol=1e-10, atol=1e-12, msg=name)
