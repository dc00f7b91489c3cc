"""`optimizer_in_backward` in the Trainer and Fabric: the results of a step after the backward, and errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning_plugin.scripts.plugin_models import (
    FeedForward,
    Model,
    assert_same_weights,
    fixed_data,
    loader,
    set_torchrun_environment,
    trainer,
    weights,
)
from torch import Tensor

from support.ranks import on_ranks, run_on_ranks
from weft.lightning import WeftModelParallelStrategy
from weft.lightning.fabric import WeftModelParallelStrategy as FabricStrategy


class Scheduled(Model):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), "interval": "step"},
        }


def _fit(rank: int, world_size: int, folder: str, in_backward: bool | str, optimizer: str, clip: float | None) -> Any:
    """Fit an epoch, save, and fit another from the checkpoint; return the losses, weights and number of steps."""
    set_torchrun_environment(rank, world_size)
    settings = {"gradient_clip_val": clip, "gradient_clip_algorithm": "value"} if clip is not None else {}
    path = Path(folder, f"{world_size}{in_backward}{optimizer}{clip}.ckpt")
    losses = []
    for epochs, checkpoint in ((1, None), (2, path)):
        model = Scheduled(optimizer=optimizer)
        strategy = WeftModelParallelStrategy(plan="auto", optimizer_in_backward=in_backward)
        run = trainer(world_size, strategy, folder, max_epochs=epochs, **settings)
        run.fit(model, loader(), ckpt_path=checkpoint)
        losses += model.losses
        run.save_checkpoint(path)
    return losses, weights(model), run.global_step


@pytest.mark.parametrize(("optimizer", "clip"), [("adamw", None), ("adamw", 0.01), ("sgd", 0)])
def test_matches_optimizer_step(tmp_path: Path, optimizer: str, clip: float | None) -> None:
    case = {"folder": str(tmp_path), "optimizer": optimizer, "clip": clip}
    [(losses, expected, steps)] = run_on_ranks(1, _fit, in_backward=False, **case)
    assert steps == 12
    for world_size, in_backward in ((1, True), (2, True), (2, "rows")):
        for got_losses, got, got_steps in run_on_ranks(world_size, _fit, in_backward=in_backward, **case):
            torch.testing.assert_close(got_losses, losses, rtol=1e-10, atol=0)
            assert_same_weights(got, expected)
            assert got_steps == steps


@on_ranks(2)
def test_fabric_matches_optimizer_step(rank: int, world_size: int) -> None:
    set_torchrun_environment(rank, world_size)
    results = []
    for in_backward in (False, True, "rows"):
        strategy = FabricStrategy(plan="auto", optimizer_in_backward=in_backward)
        fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy)
        fabric.launch()
        torch.manual_seed(2)
        model = fabric.setup(FeedForward())
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
        for batch in fixed_data().split(4):
            fabric.backward((model(batch) - batch).square().mean())
            assert all((parameter.grad is None) == bool(in_backward) for parameter in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
        results.append(weights(model.module))
        if in_backward:
            for clip in ({"max_norm": 1.0}, {"clip_val": 1.0}):
                with pytest.raises(RuntimeError, match="leaves no gradient to clip; pass optimizer_in_backward=False"):
                    fabric.clip_gradients(model, optimizer, **clip)
            with pytest.raises(ValueError, match="supports one optimizer"):
                fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
    for result in results[1:]:
        assert_same_weights(result, results[0])


@on_ranks(2, keeps_groups=True)
@pytest.mark.parametrize(
    "settings", [{"accumulate_grad_batches": 2}, {"callbacks": [GradientAccumulationScheduler({0: 5})]}]
)
def test_accumulates_over_batches(rank: int, world_size: int, tmp_path: Path, settings: dict[str, Any]) -> None:
    """The 6 batches of an epoch leave a remainder, with which the Trainer steps, too."""
    set_torchrun_environment(rank, world_size)
    for options in ({"layout": "tp2"}, {"layout": "dp2"}, {"layout": "dp2", "zero_stage": 0}):
        results = []
        for in_backward in (False, True, "rows") if options["layout"] == "tp2" else (False, True):
            model = Model(optimizer="sgd")
            strategy = WeftModelParallelStrategy(plan="auto", optimizer_in_backward=in_backward, **options)
            run = trainer(world_size, strategy, tmp_path, max_epochs=2, **settings)
            run.fit(model, loader())
            results.append((run.global_step, weights(model)))
        for num_steps, result in results[1:]:
            assert num_steps == results[0][0] == (6 if "callbacks" not in settings else 2 * -(-len(loader()) // 5))
            assert_same_weights(result, results[0][1])


@on_ranks(2, keeps_groups=True)
@pytest.mark.parametrize("num_accumulated", [1, 4])
def test_clips_by_norm(rank: int, world_size: int, tmp_path: Path, num_accumulated: int) -> None:
    """The 6 batches of an epoch leave a remainder, with which the Trainer steps, too."""
    set_torchrun_environment(rank, world_size)
    settings = {"gradient_clip_val": 0.02, "accumulate_grad_batches": num_accumulated, "max_epochs": 2}
    for options in ({"layout": "tp2"}, {"layout": "dp2"}, {"layout": "dp2", "zero_stage": 0}):
        results, norms = [], []
        for in_backward in (False, True, "rows") if options["layout"] == "tp2" else (False, True):
            model = Model(optimizer="sgd")
            strategy = WeftModelParallelStrategy(plan="auto", optimizer_in_backward=in_backward, **options)
            run = trainer(world_size, strategy, tmp_path, **settings)
            run.fit(model, loader())
            assert run.callback_metrics["gradient_norm"] == strategy.gradient_norm
            norms.append(strategy.gradient_norm)
            results.append(weights(model))
        assert norms[0] > 0.02, "the last step is not clipped"
        for norm, result in zip(norms[1:], results[1:], strict=True):
            torch.testing.assert_close(norm, norms[0], rtol=1e-10, atol=0)
            assert_same_weights(result, results[0])


@on_ranks(2)
def test_fabric_accumulates(rank: int, world_size: int) -> None:
    set_torchrun_environment(rank, world_size)
    results = []
    for in_backward in (False, True, "rows"):
        strategy = FabricStrategy(plan="auto", optimizer_in_backward=in_backward)
        fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy)
        fabric.launch()
        torch.manual_seed(2)
        model = fabric.setup(FeedForward())
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
        for idx, batch in enumerate(fixed_data().split(4)):
            with fabric.no_backward_sync(model, enabled=idx % 3 != 2):
                fabric.backward((model(batch) - batch).square().mean())
            is_stepped = bool(in_backward) and idx % 3 == 2
            assert all((parameter.grad is None) == is_stepped for parameter in model.parameters())
            if idx % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
        results.append(weights(model.module))
    for result in results[1:]:
        assert_same_weights(result, results[0])


@on_ranks(2)
def test_rows_require_fused_tensor_parallel_mlps(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    log_lines: list[str] = []
    strategy = WeftModelParallelStrategy(plan="auto", optimizer_in_backward="rows")
    strategy._engine.console.log = log_lines.append
    trainer(world_size, strategy, tmp_path, max_epochs=1).fit(Model(), loader())
    assert [line for line in log_lines if "rows" in line and not line.startswith("weft: trained")] == [
        "weft steps 3 weights of fused MLPs some rows at a time, from 'feed_forward.w1.weight' on."
    ]
    columns = {"feed_forward.w1": "column", "feed_forward.w3": "column", "feed_forward.w2": "row"}
    strategy = WeftModelParallelStrategy(plan=columns, optimizer_in_backward="rows")
    with pytest.raises(ValueError, match="optimizer_in_backward='rows' found no fused MLP"):
        trainer(world_size, strategy, tmp_path).fit(Model(), loader())
    strategy = WeftModelParallelStrategy(plan="auto", layout="dp2", optimizer_in_backward="rows")
    with pytest.raises(ValueError, match="'rows' with 2 data-parallel ranks, over which full gradients are averaged"):
        trainer(world_size, strategy, tmp_path).fit(Model(), loader())


class AfterBackward(L.Callback):
    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """Do nothing: the override itself must raise, because the hook would find no gradients."""


class OwnStep(Model):
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)


class OwnBackward(Model):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(loss, *args, **kwargs)


class Manual(Model):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class UnsupportedOptimizer(Model):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.RMSprop(self.parameters())


@on_ranks(1)
@pytest.mark.parametrize(
    ("model", "settings", "reason"),
    [
        (OwnBackward, {"gradient_clip_val": 0.5}, "OwnBackward overrides backward"),
        (Model, {"callbacks": [AfterBackward()]}, "the callback AfterBackward overrides on_after_backward"),
        (OwnStep, {}, "OwnStep overrides optimizer_step"),
        (Manual, {}, "Manual optimizes manually"),
        (UnsupportedOptimizer, {}, "the optimizer is of class RMSprop"),
    ],
)
def test_unsupported_settings_raise(rank: int, tmp_path: Path, model: type[Model], settings: dict, reason: str) -> None:
    set_torchrun_environment(rank, 1)
    strategy = WeftModelParallelStrategy(plan="auto", optimizer_in_backward=True)
    run = trainer(1, strategy, tmp_path, **settings)
    with pytest.raises(ValueError, match=rf"optimizer_in_backward.*{reason}.*optimizer_in_backward=False"):
        run.fit(model(), loader())
    run.validate(Model(), loader(), verbose=False)


class Failing(Model):
    fails = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.fails = batch_idx == 1
        return super().training_step(batch, batch_idx)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        if self.fails:
            normed.register_hook(self._fail)
        return self.feed_forward(normed)

    @staticmethod
    def _fail(grad: Tensor) -> None:
        raise RuntimeError("in the middle")


@on_ranks(1)
def test_exception_in_backward_warns_of_partial_update(rank: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, 1)
    strategy = WeftModelParallelStrategy(plan="auto", optimizer_in_backward=True)
    log_lines: list[str] = []
    strategy._engine.console.log = log_lines.append
    with pytest.raises(RuntimeError, match="in the middle"):
        trainer(1, strategy, tmp_path).fit(Failing(), loader())
    assert "the run ended within a step, after" in log_lines[-1]
    assert "resume from a checkpoint" in log_lines[-1]
