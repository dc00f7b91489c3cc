"""Memory of each rank under the strategies, by category."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from lightning_plugin.scripts.plugin_models import set_torchrun_environment, trainer
from ops.memory.counting import counted
from torch import Tensor, nn

import weft
from support.ranks import on_ranks, run_on_ranks
from weft.lightning import WeftModelParallelStrategy
from weft.lightning.fabric import WeftModelParallelStrategy as FabricStrategy
from weft.strategy.deferred import is_deferred

DIM, HIDDEN, BATCH = 1024, 1536, 4
WEIGHTS = 3 * DIM * HIDDEN * 4


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(DIM, HIDDEN, bias=False)
        self.w2 = nn.Linear(HIDDEN, DIM, bias=False)
        self.w3 = nn.Linear(DIM, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.feed_forward = FeedForward()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 0:  # recognizing this small model takes more memory than training it
            weft.memory.reset_peak()
        return self.feed_forward(batch).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.feed_forward(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), fused=True)


def _batches() -> torch.utils.data.DataLoader:
    return torch.utils.data.DataLoader(torch.randn(4 * BATCH, DIM), batch_size=BATCH)


def _check_peak(peak: dict[str, int], before: dict[str, int], world_size: int) -> None:
    growth = {name: peak[name] - before[name] for name in peak}
    assert growth["parameters"] == growth["gradients"] == WEIGHTS // world_size
    assert growth["optimizer_state"] == 2 * WEIGHTS // world_size + 3 * 4
    assert growth["other"] <= 0.01 * sum(growth.values())


@on_ranks(1, 2)
def test_trainer_peak_by_category(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    with counted():
        before = weft.memory.by_category()
        model = Model()
        run = trainer(world_size, WeftModelParallelStrategy(plan="auto"), tmp_path)
        run.fit(model, _batches(), _batches())
        _check_peak(weft.memory.by_category(at="peak"), before, world_size)
        names = [phase.name for phase in weft.memory.timeline()]
        # The optimizer's step calls the closure, so the phases forward and backward are inside the phase step.
        assert names[:6] == ["forward", "backward", "between steps", "step", "forward", "backward"]
        assert "inference" in names


@on_ranks(2)
def test_fabric_peak_by_category(rank: int, world_size: int) -> None:
    set_torchrun_environment(rank, world_size)
    with counted():
        before = weft.memory.by_category()
        fabric = Fabric(accelerator="cpu", devices=world_size, strategy=FabricStrategy(plan="auto"))
        fabric.launch()
        model = FeedForward()
        model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), fused=True))
        weft.memory.reset_peak()
        for batch in torch.randn(3, BATCH, DIM):
            fabric.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        _check_peak(weft.memory.by_category(at="peak"), before, world_size)
        names = [phase.name for phase in weft.memory.timeline()]
        start = names.index("forward")
        assert names[start : start + 4] == ["forward", "backward", "step", "between steps"]


@pytest.mark.parametrize("calls", [1, 2])
@on_ranks(1)
def test_runs_leave_no_hooks(rank: int, tmp_path: Path, calls: int) -> None:
    set_torchrun_environment(rank, 1)
    with counted():
        model = Model()
        run = trainer(1, WeftModelParallelStrategy(plan="auto"), tmp_path)
        for _ in range(calls):
            run.fit_loop.max_epochs = (run.fit_loop.max_epochs or 0) + 1
            run.fit(model, _batches())
        parameter = model.feed_forward.w1.weight
        assert not getattr(parameter, "_post_accumulate_grad_hooks", None)


class _UserOptimizer(Model):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.RMSprop(self.parameters()) if self.has_rmsprop else torch.optim.AdamW(self.parameters())


@on_ranks(2)
def test_optimizers_are_fused_if_possible_and_wanted(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    log_lines: list[str] = []
    for has_rmsprop, fused_optimizers in ((False, True), (True, True), (False, False)):
        model = _UserOptimizer()
        model.has_rmsprop = has_rmsprop
        strategy = WeftModelParallelStrategy(plan="auto", fused_optimizers=fused_optimizers)
        strategy._engine.console.log = log_lines.append
        trainer(world_size, strategy, tmp_path).fit(model, _batches())
        [group] = strategy.optimizers[0].param_groups
        assert bool(group.get("fused")) == (fused_optimizers and not has_rmsprop)
    assert [text for text in log_lines if "built in full" not in text and not text.startswith("weft: ")] == [
        "weft makes AdamW use its fused kernels, without temporaries; fused_optimizers=False prevents it.",
        "weft leaves RMSprop as it is: RMSprop has no fused variant.",
    ]


@on_ranks(2)
def test_full_model_is_sharded_weight_by_weight_with_hint(rank: int, world_size: int, tmp_path: Path) -> None:
    """Start-up holds at most the full model and one more shard; the hint names the bytes and the remedy."""
    set_torchrun_environment(rank, world_size)
    log_lines: list[str] = []
    with counted() as count:
        model = Model()
        strategy = WeftModelParallelStrategy(plan="auto")
        strategy._engine.console.log = log_lines.append
        strategy._engine.memory_watch.begin = lambda *_: log_lines.append(
            f"{count.peak() - count.peak('communication')} {count.now() - count.now('communication')}"
        )
        trainer(world_size, strategy, tmp_path).fit(model, _batches())
    peak, now = map(int, next(text for text in log_lines if text[0].isdigit()).split())
    data = 4 * BATCH * DIM * 4
    assert now <= WEIGHTS // 2 + data + 1024
    assert WEIGHTS < peak <= WEIGHTS + WEIGHTS // 3 // 2 + data + 1024
    assert log_lines[0] == (
        "weft got a model that was built in full, 0.019 GB on every rank: build it in configure_model, and each rank "
        "materializes only its shards."
    )


class _Configured(Model):
    """Its layers are created in configure_model, where the strategy defers their values."""

    def __init__(self) -> None:
        pl.LightningModule.__init__(self)
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if not hasattr(self, "feed_forward"):
            self.feed_forward = FeedForward()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.feed_forward(batch).square().mean()
        self.losses.append(loss.item())
        return loss


def _losses(rank: int, world_size: int, folder: str, empty_init: bool) -> tuple[list[float], int]:
    """Return the losses, and the start-up peak without the model's first forward."""
    set_torchrun_environment(rank, world_size)
    torch.manual_seed(21)
    data = torch.utils.data.DataLoader(torch.randn(4 * BATCH, DIM), batch_size=BATCH)
    with counted() as count:
        model = _Configured()
        plan = {"feed_forward.w1": "column", "feed_forward.w3": "column", "feed_forward.w2": "row"}
        strategy = WeftModelParallelStrategy(plan=plan, empty_init=empty_init)
        strategy._engine.memory_watch.begin = lambda *_: peaks.append(count.peak("other"))
        peaks: list[int] = []
        trainer(world_size, strategy, folder).fit(model, data)
        return model.losses, peaks[0]


def test_configure_model_builds_shards_equal_to_one_device(tmp_path: Path) -> None:
    [(expected, _)] = run_on_ranks(1, _losses, folder=str(tmp_path), empty_init=False)
    for world_size in (1, 2, 4):
        shards = WEIGHTS // world_size
        for losses, peak in run_on_ranks(world_size, _losses, folder=str(tmp_path), empty_init=True):
            torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)
            # The rest is a chunk of the random stream, and memory for recognizing the layers.
            assert shards <= peak <= shards + 800_000
    for losses, peak in run_on_ranks(2, _losses, folder=str(tmp_path), empty_init=False):
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)
        assert peak >= WEIGHTS


@on_ranks(2)
def test_init_module_defers_parameters(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    torch.manual_seed(5)
    expected = FeedForward()
    run = trainer(world_size, WeftModelParallelStrategy(plan="auto"), tmp_path, max_epochs=0)
    torch.manual_seed(5)
    with run.init_module(empty_init=True):
        model = Model()
    assert is_deferred(model.feed_forward.w1.weight)
    run.fit(model, _batches())
    weight = model.feed_forward.w1.weight
    assert torch.equal(weight.full_tensor(), expected.w1.weight)
    with run.init_module():
        assert not is_deferred(FeedForward().w1.weight)
    stock = trainer(world_size, WeftModelParallelStrategy(plan="auto", empty_init=False), tmp_path)
    with stock.init_module(empty_init=True):
        assert FeedForward().w1.weight.is_meta

    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=FabricStrategy(plan="auto"))
    fabric.launch()
    torch.manual_seed(5)
    with fabric.init_module(empty_init=True):
        built = FeedForward()
    assert is_deferred(built.w1.weight)
    assert torch.equal(fabric.setup(built).w2.weight.full_tensor(), expected.w2.weight)
