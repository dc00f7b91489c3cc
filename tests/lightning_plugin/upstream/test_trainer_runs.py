"""What Lightning's integration tests of the Trainer's ModelParallelStrategy check, under their names; no plan."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_plugin.scripts.plugin_models import (
    FeedForward,
    assert_same_weights,
    fixed_data,
    loader,
    set_torchrun_environment,
)
from lightning_plugin.scripts.plugin_models import trainer as quiet_trainer
from lightning_plugin.upstream.parts import full_values, shard_both, shard_data, shard_features
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DistributedSampler
from torchmetrics import MeanMetric

from support.ranks import on_ranks
from weft.lightning import WeftModelParallelStrategy


class Model(LightningModule):
    """Sharded by `function` in configure_model; records the weights at the start of training."""

    def __init__(self, function: Any = shard_both, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.model = FeedForward(torch.get_default_dtype() if dtype is None else dtype)
        self.function = function
        self.start: dict[str, Tensor] = {}

    def configure_model(self) -> None:
        self.function(self.model, self.device_mesh)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        batch = batch.to(self.model.w1.weight.dtype)
        return (self.model(batch) - batch).square().mean()

    def on_train_start(self) -> None:
        self.start = full_values(self.model)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class PlainModel(Model):
    def configure_model(self) -> None:
        pass


def trainer(rank: int, world_size: int, folder: Any, strategy: Any = None, **options: Any) -> Trainer:
    """Return a quiet Trainer of two data-parallel ranks and, of four ranks, two tensor-parallel ones."""
    set_torchrun_environment(rank, world_size)
    if strategy is None:
        strategy = WeftModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=world_size // 2)
    return quiet_trainer(world_size, strategy, folder, **{"use_distributed_sampler": True, **options})


def initialized(run: Trainer, make: Any, *args: Any, empty: bool = True) -> Any:
    """Return a module created in `init_module`; its random weights are the same on all ranks."""
    seed_everything(3, verbose=False)
    with run.init_module(empty_init=empty):
        return make(*args)


@on_ranks(4)
def test_setup_device_mesh(rank: int, world_size: int, tmp_path: Path) -> None:
    for sizes in ((1, 4), (4, 1), (2, 2), ("auto", "auto")):
        strategy = WeftModelParallelStrategy(data_parallel_size=sizes[0], tensor_parallel_size=sizes[1])
        model = Model(lambda *_: None)
        trainer(rank, world_size, tmp_path, strategy, max_steps=1).fit(model, loader())
        mesh = model.device_mesh
        assert mesh.mesh_dim_names == ("data_parallel", "tensor_parallel")
        assert mesh.device_type == "cpu"
        assert mesh.shape == ((1, 4) if sizes[0] == "auto" else sizes)


class GatheringModel(Model):
    """Gathers each batch from all ranks, and asserts which of them have the same batch."""

    def on_train_start(self) -> None:
        super().on_train_start()
        data, _ = self.device_mesh.shape
        optimizer = self.optimizers()
        mesh = self.device_mesh if data > 1 else self.device_mesh["tensor_parallel"]
        for weight in (*self.model.parameters(), *optimizer.param_groups[0]["params"]):
            assert weight.device_mesh.shape == mesh.shape
            assert not weight.is_meta
        batches = self.trainer.train_dataloader
        assert isinstance(batches.sampler, DistributedSampler)
        assert len(batches) == len(loader()) // data

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        gathered = self.all_gather(batch)
        data, tensor = self.device_mesh.shape
        assert gathered.shape[0] == data * tensor
        assert torch.equal(*gathered[self.device_mesh["tensor_parallel"].mesh])
        if data > 1:
            assert not torch.equal(*gathered[self.device_mesh["data_parallel"].mesh])
        assert torch.equal(self.all_gather(batch, group=self.device_mesh["tensor_parallel"])[0], batch)
        losses = super().training_step(batch, batch_idx)
        self.log("mean", losses, sync_dist=True)
        everyone = self.all_gather(losses.detach())
        torch.testing.assert_close(self.trainer.strategy.reduce(losses.detach()), everyone.mean())
        return losses


@on_ranks(2)
def test_tensor_parallel(rank: int, world_size: int, tmp_path: Path) -> None:
    strategy = WeftModelParallelStrategy()
    run = trainer(rank, world_size, tmp_path, strategy, max_steps=2)
    model = initialized(run, GatheringModel, shard_features)
    run.fit(model, loader())
    assert strategy.distributed_sampler_kwargs == {"num_replicas": 1, "rank": 0}
    assert run.callback_metrics["mean"].isfinite()


@on_ranks(4)
def test_fsdp2_tensor_parallel(rank: int, world_size: int, tmp_path: Path) -> None:
    run = trainer(rank, world_size, tmp_path, max_steps=2)
    run.fit(initialized(run, GatheringModel, shard_both), loader())


class CompiledModel(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

    def configure_model(self) -> None:
        self.model = torch.compile(self.model, backend="eager")

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model(batch.float()).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


@on_ranks(1)
def test_model_parallel_single_file_checkpoint_with_compile(rank: int, world_size: int, tmp_path: Path) -> None:
    """Also what test_align_compiled_param_names_with_module checks: the file has the states under the ids of all."""
    strategy = WeftModelParallelStrategy(1, 1, save_distributed_checkpoint=False)
    run = trainer(rank, world_size, tmp_path, strategy, max_steps=2)
    run.fit(initialized(run, CompiledModel), loader())
    run.save_checkpoint(tmp_path / "compiled.ckpt")
    [saved] = torch.load(tmp_path / "compiled.ckpt", weights_only=True)["optimizer_states"]
    assert set(saved["state"]) == {0, 1, 2, 3} == set(saved["param_groups"][0]["params"])


@on_ranks(2)
def test_modules_without_parameters(rank: int, world_size: int, tmp_path: Path) -> None:
    """A metric is moved to the device, and keeps its group: it counts all ranks, as in stock."""

    class WithMetric(Model):
        def __init__(self) -> None:
            super().__init__(shard_features)
            self.metric = MeanMetric()

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            assert self.metric.device == self.device
            assert self.metric.process_group is None
            self.metric(float(rank))
            return super().training_step(batch, batch_idx)

    model = WithMetric()
    trainer(rank, world_size, tmp_path, WeftModelParallelStrategy(), max_steps=1).fit(model, loader())
    assert model.metric.compute() == 0.5


@on_ranks(2)
@pytest.mark.parametrize("precision", ["32-true", "16-true", "bf16-true"])
def test_module_init_context(rank: int, world_size: int, precision: str, tmp_path: Path) -> None:
    dtype = {"32-true": torch.float32, "16-true": torch.float16, "bf16-true": torch.bfloat16}[precision]
    for empty, device in ((False, "cpu"), (True, "meta")):
        run = trainer(rank, world_size, tmp_path, precision=precision, max_steps=1)
        model = initialized(run, Model, shard_data, empty=empty)
        assert {(weight.device.type, weight.dtype) for weight in model.parameters()} == {(device, dtype)}
        run.fit(model, loader())
        used = model.optimizers(use_pl_optimizer=False).param_groups[0]["params"]
        assert {(weight.device.type, weight.dtype) for weight in (*model.parameters(), *used)} == {("cpu", dtype)}


@on_ranks(2)
@pytest.mark.parametrize("is_distributed", [True, False])
def test_strategy_state_dict(rank: int, world_size: int, is_distributed: bool, tmp_path: Path) -> None:
    model = Model()
    names = list(model.state_dict())
    strategy = WeftModelParallelStrategy(2, 1, save_distributed_checkpoint=is_distributed)
    run = trainer(rank, world_size, tmp_path, strategy)
    run.fit(model, loader())
    state = run.strategy.lightning_module_state_dict()
    assert list(state) == (names if is_distributed or rank == 0 else [])
    assert all(isinstance(value, DTensor) == is_distributed for value in state.values())


def _file_strategy() -> WeftModelParallelStrategy:
    return WeftModelParallelStrategy(2, 1, save_distributed_checkpoint=False)


def _assert_reads_file_of(writer: str, rank: int, world_size: int, folder: Path) -> None:
    """Train and save one file by "ddp" or "sharded", continue with the other, and compare the two states."""
    states: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
    for kind in (writer, "ddp" if writer == "sharded" else "sharded"):
        model = Model(shard_data) if kind == "sharded" else PlainModel()
        run = trainer(rank, world_size, folder, _file_strategy() if kind == "sharded" else "ddp")
        run.fit(model, loader(), ckpt_path=folder / "file.ckpt" if states else None)
        states[kind] = (run.strategy.lightning_module_state_dict(), run.strategy.optimizer_state(model.optimizers()))
        if len(states) == 1:
            run.save_checkpoint(folder / "file.ckpt")
    if rank == 0:
        torch.testing.assert_close(*states.values(), atol=0, rtol=0)
    else:
        assert states["sharded"] == ({}, {})


@on_ranks(2)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_load_full_state_checkpoint_into_regular_model(rank: int, world_size: int, tmp_path: Path) -> None:
    _assert_reads_file_of("sharded", rank, world_size, tmp_path)


@on_ranks(2)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_load_standard_checkpoint_into_distributed_model(rank: int, world_size: int, tmp_path: Path) -> None:
    _assert_reads_file_of("ddp", rank, world_size, tmp_path)


@on_ranks(2)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_save_load_sharded_state_dict(rank: int, world_size: int, tmp_path: Path) -> None:
    """A second run continues from the directory that ModelCheckpoint has written over one of an earlier run."""
    for num_epochs in (1, 1, 2):
        callback = ModelCheckpoint(dirpath=tmp_path, filename="last", enable_version_counter=False)
        options = {"enable_checkpointing": True, "callbacks": [callback], "max_epochs": num_epochs}
        run = trainer(rank, world_size, tmp_path, **options)
        model = initialized(run, Model, shard_data)
        run.fit(model, loader(), ckpt_path=tmp_path / "last.ckpt" if num_epochs == 2 else None)
        if num_epochs == 1:
            expected = full_values(model.model)
            path = Path(callback.best_model_path)
            assert set(os.listdir(path)) == {"meta.pt", ".metadata", "__0_0.distcp", "__1_0.distcp"}
            saved = torch.load(path / "meta.pt", weights_only=True)
            assert "pytorch-lightning_version" in saved
            assert len(saved["callbacks"]) == 1
            assert not saved.keys() & {"state_dict", "optimizer_states"}
    assert_same_weights(model.start, expected, rtol=0)
    assert not torch.equal(full_values(model.model)["w1.weight"], expected["w1.weight"])


class GroupsModel(PlainModel):
    """With a plan, gathers and reduces over the data axes, unless a group is given."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        rank, reduce = self.global_rank, self.trainer.strategy.reduce
        expected = {
            None: [rank % 2, rank % 2 + 2],
            "data_parallel": [rank % 2, rank % 2 + 2],
            "tensor_parallel": [rank // 2 * 2, rank // 2 * 2 + 1],
            "world": [0, 1, 2, 3],
        }
        for group, ranks in expected.items():
            assert self.all_gather(torch.tensor([rank]), group=group).flatten().tolist() == ranks
            assert reduce(torch.tensor(rank), group=group, reduce_op="sum").item() == sum(ranks)
        return super().training_step(batch, batch_idx)


@on_ranks(4)
def test_groups_with_a_plan(rank: int, world_size: int, tmp_path: Path) -> None:
    strategy = WeftModelParallelStrategy(2, 2, plan="auto")
    trainer(rank, world_size, tmp_path, strategy, max_steps=1).fit(GroupsModel(), loader())


@on_ranks(2)
def test_training_equals_stock(rank: int, world_size: int, tmp_path: Path) -> None:
    """With AdamW, whose kernels weft leaves alone without a plan."""
    from lightning.pytorch.strategies import ModelParallelStrategy

    trained = []
    for cls in (ModelParallelStrategy, WeftModelParallelStrategy):
        run = trainer(rank, world_size, tmp_path, cls(2, 1), gradient_clip_val=0.1, gradient_clip_algorithm="value")
        model = initialized(run, Model, shard_data)
        run.fit(model, loader(fixed_data().float()))
        trained.append(full_values(model))
    assert_same_weights(*trained, rtol=0)
