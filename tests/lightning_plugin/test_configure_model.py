"""plan=None is Lightning's own behaviour; with a plan, `configure_model` runs first and is optional."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning_plugin.scripts.plugin_models import (
    FeedForward,
    Model,
    assert_same_weights,
    loader,
    set_torchrun_environment,
    trainer,
    weights,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from support.ranks import on_ranks, run_on_ranks
from weft.lightning import WeftModelParallelStrategy


class StockModel(Model):
    """Sharded by its own `configure_model`, as for Lightning's ModelParallelStrategy."""

    def configure_model(self) -> None:
        if isinstance(self.feed_forward.w1.weight, DTensor):
            return
        plan = {"w1": ColwiseParallel(), "w3": ColwiseParallel(), "w2": RowwiseParallel()}
        parallelize_module(self.feed_forward, self.device_mesh["tensor_parallel"], plan)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, foreach=False)


class DataParallelModel(Model):
    def configure_model(self) -> None:
        fully_shard(self, mesh=self.device_mesh["data_parallel"])


class BuildingModel(Model):
    """Builds its layers in `configure_model`, as large models do."""

    num_calls = 0

    def configure_model(self) -> None:
        self.num_calls += 1
        if self.num_calls == 1:
            torch.manual_seed(5)
            self.feed_forward = FeedForward()


@on_ranks(2)
def test_without_plan_equals_stock_strategy(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    trained = {}
    for cls in (ModelParallelStrategy, WeftModelParallelStrategy):
        model = StockModel()
        run = trainer(world_size, cls(save_distributed_checkpoint=False), tmp_path)
        run.fit(model, loader())
        run.test(model, loader(), verbose=False)
        trained[cls] = weights(model)
        assert not isinstance(model.norm.weight, DTensor)
    assert_same_weights(*trained.values(), rtol=0)
    with pytest.raises(
        TypeError, match=r"required to override the `configure_model.*; or pass plan='auto', and weft shards the Model"
    ):
        trainer(world_size, WeftModelParallelStrategy(), tmp_path).fit(Model(), loader())


@on_ranks(2)
def test_data_parallel_size_without_plan_sets_sampler(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    strategy = WeftModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    run, model = trainer(world_size, strategy, tmp_path, use_distributed_sampler=True), DataParallelModel()
    run.fit(model, loader())
    assert len(model.losses) == len(loader()) // 2
    assert strategy.distributed_sampler_kwargs == {"num_replicas": 2, "rank": rank}
    assert model.scale.full_tensor().shape == model.scale.shape


@on_ranks(2)
def test_model_built_in_configure_model_is_sharded_once(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    model, run = BuildingModel(), trainer(world_size, "weft", tmp_path)
    run.fit(model, loader())
    first = model.feed_forward.w1.weight
    run.test(model, loader(), verbose=False)
    run.fit_loop.max_epochs = 2
    run.fit(model, loader())
    assert model.num_calls == 3
    assert model.feed_forward.w1.weight is first
    assert first.to_local().shape[0] * world_size == first.shape[0]
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert "configure_model" not in vars(model)

    reference = BuildingModel()
    run = trainer(1, "auto", tmp_path)
    run.fit(reference, loader())
    run.fit_loop.max_epochs = 2
    run.fit(reference, loader())  # each fit creates an optimizer
    assert_same_weights(weights(model), weights(reference))


@on_ranks(2)
def test_plan_on_user_sharding_raises(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    explicit = WeftModelParallelStrategy(plan={"feed_forward.w1": "column"})
    with pytest.raises(ValueError, match=r"feed_forward\.w1"):
        trainer(world_size, explicit, tmp_path).fit(StockModel(), loader())


class EarlyOptimizer(Model):
    """Creates its optimizer in its constructor, before sharding, as LightningCLI does."""

    def __init__(self) -> None:
        super().__init__()
        self.early_optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.early_optimizer


def _train_with_early_optimizer(
    rank: int, world_size: int, folder: str, settings: dict | None
) -> dict[str, torch.Tensor]:
    set_torchrun_environment(rank, world_size)
    strategy = "auto" if settings is None else WeftModelParallelStrategy(plan="auto", **settings)
    model = EarlyOptimizer()
    for _ in range(2):  # the optimizer and its states outlive a run
        trainer(world_size, strategy, folder).fit(model, loader())
        strategy = "auto" if settings is None else WeftModelParallelStrategy(plan="auto", **settings)
    return weights(model)


def test_optimizer_created_before_sharding_trains_shards(tmp_path: Path) -> None:
    """Sharding replaces the parameters, so an optimizer that still referenced the old ones would train nothing."""
    [expected] = run_on_ranks(1, _train_with_early_optimizer, folder=str(tmp_path), settings=None)
    for settings in ({}, {"layout": "dp2"}, {"layout": "dp2", "zero_stage": 1}):
        for result in run_on_ranks(2, _train_with_early_optimizer, folder=str(tmp_path), settings=settings):
            assert_same_weights(result, expected)
