"""layout="auto": the Trainer chooses a layout that fits, says which, and trains with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning_plugin.scripts.plugin_models import set_torchrun_environment, trainer
from lightning_plugin.test_dry_run import LitText, batch
from torch.utils.data import DataLoader

import support.warm_starts  # noqa: F401  (for dry runs)
from support.ranks import on_ranks
from weft._plugin.console import Console
from weft._plugin.dry_run_options import FirstBatch
from weft.lightning import WeftModelParallelStrategy
from weft.lightning_fabric import WeftModelParallelStrategy as FabricStrategy
from weft.strategy.tuning import tune_module

NUM_STEPS = 2


class Text(LitText):
    """Does not count memory."""

    def __init__(self) -> None:
        super().__init__()
        self.began = True


class Validated(Text):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass


class Data(pl.LightningDataModule):
    """Has batches only after `prepare_data` and `setup`, and a loader with a worker process."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.path = folder / "batches.pt"

    def prepare_data(self) -> None:
        torch.save([batch() for _ in range(NUM_STEPS)], self.path)

    def setup(self, stage: str) -> None:
        self.batches = torch.load(self.path)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.batches, batch_size=None, num_workers=1, multiprocessing_context="fork")

    def val_dataloader(self) -> DataLoader:
        return self.train_dataloader()


def _fit(world_size: int, tmp_path: Path, data: Any, module: pl.LightningModule, **options: Any) -> Any:
    strategy = WeftModelParallelStrategy(plan="auto", layout="auto", **options)
    run = trainer(world_size, strategy, tmp_path, precision="32-true", max_epochs=1)
    run.fit(module, data)
    return run


@on_ranks(4, timeout=400)
def test_trainer_chooses_a_layout(rank: int, world_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_torchrun_environment(rank, world_size)
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path / "cache"))
    lines: list[str] = []
    monkeypatch.setattr(Console, "log", lambda self, text: lines.append(text))
    run = _fit(world_size, tmp_path, Data(tmp_path), Text())
    mesh = run.strategy.device_mesh
    assert mesh.size() == world_size and run.global_step == NUM_STEPS
    [said] = [line for line in lines if "layout='auto' chooses" in line]
    sizes = dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))
    short = {"data_replicate": "rep", "data_parallel": "dp", "tensor_parallel": "tp"}
    chosen = ",".join(f"{short[name]}{size}" for name, size in sizes.items() if size > 1)
    stage = run.strategy._engine.sharding_stage
    name = f"'{chosen}' with zero_stage={stage}" if stage != 3 else f"'{chosen}'"
    assert f"chooses {name} of 12 variants: " in said and "rows/s predicted with the rates of cpu; next " in said
    assert "earlier search" not in said
    with pytest.raises(ValueError, match="got layout='auto', which fit chooses; pass a layout to validate"):
        other = trainer(world_size, WeftModelParallelStrategy(plan="auto", layout="auto"), tmp_path)
        other.validate(Validated(), Data(tmp_path))
    run.fit_loop.max_epochs = 2
    run.fit(run.lightning_module, Data(tmp_path))  # keeps the layout
    assert run.strategy.device_mesh is mesh and run.global_step == 2 * NUM_STEPS
    lines.clear()
    again = _fit(world_size, tmp_path, Data(tmp_path), Text())
    [said_again] = [line for line in lines if "layout='auto' chooses" in line]
    [path] = (tmp_path / "cache" / "layouts").iterdir()
    assert said_again == f"{said} This is the result of an earlier search, from {path}."
    assert tuple(again.strategy.device_mesh.shape) == tuple(mesh.shape)


@pytest.fixture(scope="module")
def least() -> tuple[str, int]:
    """Return the layout of two ranks with the least bytes, and these."""
    options: dict[str, Any] = {"keeps_batch": True, "memory": "1GB", "zero_stage": 3, "fixed": "pp=1"}
    found = tune_module(Text, 2, batch=batch, cluster="cpu", **options)
    layout = min(found.layouts, key=lambda each: each.peak_bytes)
    return layout.layout, layout.peak_bytes


@on_ranks(2, timeout=400)
def test_memory_decides_and_nothing_fits(rank: int, world_size: int, tmp_path: Path, least: tuple[str, int]) -> None:
    set_torchrun_environment(rank, world_size)
    loader = DataLoader([batch() for _ in range(NUM_STEPS)], batch_size=None)
    run = _fit(world_size, tmp_path, loader, Text(), memory_limit=least[1], zero_stage=3)
    tensor_size = run.strategy.device_mesh["tensor_parallel"].size()
    assert least[0] == ("tp2" if tensor_size == 2 else "dp2")
    message = rf"got layout='auto': No layout fits into 0.001 GB: the least is 0\.0\d+ GB, with layout {least[0]}"
    with pytest.raises(ValueError, match=message):
        _fit(world_size, tmp_path, loader, Text(), memory_limit="1MB", zero_stage=3)
    with pytest.raises(ValueError, match="the batches come from a dict; pass one DataLoader"):
        _fit(world_size, tmp_path, {"a": loader, "b": loader}, Text())


def test_first_batch_leaves_the_data_module_alone(tmp_path: Path) -> None:
    data = Data(tmp_path)
    data.trainer = object()
    assert torch.equal(FirstBatch(data)(), batch())
    assert not hasattr(data, "batches") and data.trainer is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "auto"}, "layout='auto' without a plan"),
        ({"plan": "auto", "memory_limit": "1GB"}, "memory_limit='1GB' without layout='auto'"),
        ({"plan": "auto", "layout": "auto", "memory_limit": "much"}, "memory_limit='much': .*give a number of bytes"),
        ({"plan": "auto", "layout": "auto", "pipeline_cuts": ["a"]}, "layout='auto' and pipeline_cuts"),
        ({"plan": "auto", "layout": "auto", "offload": {"optimizer": "cpu"}}, "layout='auto' and offload"),
        ({"plan": "auto", "layout": "auto", "join_gate_up": True}, "layout='auto' and join_gate_up"),
        ({"plan": "auto", "layout": "auto", "optimizer_in_backward": "rows"}, "and optimizer_in_backward='rows'"),
        ({"plan": "auto", "layout": "auto", "activation_checkpointing": ["a"]}, "activation_checkpointing by patterns"),
        ({"plan": "auto", "layout": "auto", "data_parallel_size": 2}, "which gives the sizes of all axes, and also"),
    ],
)
def test_invalid_options_raise_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WeftModelParallelStrategy(**options)


def test_fabric_has_no_model_to_choose_for() -> None:
    with pytest.raises(ValueError, match="Fabric joins its ranks before it has a model"):
        FabricStrategy(plan="auto", layout="auto")
