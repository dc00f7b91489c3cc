"""Samplers, logs, metrics and random numbers over the data axes: each replica counts once; replicas start equal."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torchmetrics
from lightning_plugin.scripts.plugin_models import (
    FeedForward,
    Model,
    fixed_data,
    loader,
    set_torchrun_environment,
    trainer,
    weights,
)
from torch import Tensor

from support.ranks import on_ranks
from weft.lightning import WeftModelParallelStrategy
from weft.strategy.reports.summary import MAX_LINES


class Logging(Model):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        rank = float(self.trainer.strategy.data_axes.rank + 1)
        for how in ("sum", "mean", "max"):
            self.log(how, rank, sync_dist=True, reduce_fx=how)
        assert self.all_gather(torch.tensor([rank])).flatten().tolist() == [1.0, 2.0]


@on_ranks(4)
def test_each_replica_counts_once(rank: int, world_size: int, tmp_path: Path) -> None:
    """The stock strategy sums over all ranks, tensor-parallel replicas too (lightning 2.6.6, `reduce_fx="sum"`)."""
    set_torchrun_environment(rank, world_size)
    strategy = WeftModelParallelStrategy(plan="auto", layout="dp2,tp2")
    run = trainer(world_size, strategy, tmp_path)
    [found] = run.validate(Logging(), loader(fixed_data()[:4]), verbose=False)
    assert found == {"sum": 3.0, "mean": 1.5, "max": 2.0}
    assert strategy.distributed_sampler_kwargs == {"num_replicas": 2, "rank": rank // 2}
    assert strategy.reduce_boolean_decision(True)
    assert not strategy.reduce_boolean_decision(rank != 3)
    assert strategy.reduce_boolean_decision(rank == 3, all=False)
    assert not strategy.reduce_boolean_decision(False, all=False)


@on_ranks(4)
def test_first_rank_logs_layout_and_bytes(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    log_lines: list[str] = []
    strategy = WeftModelParallelStrategy(plan="auto", layout="dp2,tp2", zero_stage=1)
    strategy._engine.console.log = log_lines.append
    run = trainer(world_size, strategy, tmp_path)
    model = Model()
    run.fit(model, loader())
    run.test(model, loader(), verbose=False)
    [summary] = [text.splitlines() for text in log_lines if text.startswith("weft: layout")]
    assert len(summary) <= MAX_LINES and all(line.startswith("weft: ") for line in summary)
    full_bytes, local_bytes = (
        sum(getattr(p, where, p).nbytes for p in model.parameters()) for where in ("data", "_local_tensor")
    )
    assert summary[0] == "weft: layout: data_parallel=2, tensor_parallel=2, zero_stage=1; plan: auto."
    assert summary[1].startswith("weft: sharded: 1 FeedForward fused, by hidden units")
    assert re.fullmatch(r"weft: replicated: \d+ of \d+ parameters, \d+\.\d % of their bytes\.", summary[2])
    start = f"weft: parameters: {full_bytes / 1e6:.3f} MB in all; MB held by rank 0: {local_bytes / 1e6:.3f}, rank 1"
    assert summary[-2].startswith(start)
    need = f"{2 * local_bytes / 1e6:.3f} MB"
    assert f"at most {need} of parameters and gradients plus {need} of Adam states" in summary[-1]


@on_ranks(4)
@pytest.mark.parametrize("layout", ["dp4", "dp2,tp2", "rep2,dp2"])
def test_sampler_shards_data_over_data_ranks(rank: int, world_size: int, tmp_path: Path, layout: str) -> None:
    set_torchrun_environment(rank, world_size)
    model = Model()
    strategy = WeftModelParallelStrategy(plan="auto", layout=layout)
    trainer(world_size, strategy, tmp_path, use_distributed_sampler=True).fit(model, loader(shuffle=True))
    tp_size = strategy.tensor_parallel_group.size()
    seen = torch.cat(model.batches)
    gathered = [torch.empty_like(seen) for _ in range(world_size)]
    dist.all_gather(gathered, seen)
    all_samples = torch.cat(gathered[::tp_size])
    assert sorted(all_samples[:, 0].tolist()) == sorted(fixed_data()[:, 0].tolist())


@on_ranks(4)
@pytest.mark.parametrize("where", ["init", "configure_model"])
def test_unseeded_replicas_start_equal(rank: int, world_size: int, tmp_path: Path, where: str) -> None:
    set_torchrun_environment(rank, world_size)

    class Unseeded(Model):
        def configure_model(self) -> None:
            if where == "configure_model" and not hasattr(self, "late"):
                self.late = FeedForward()

        def on_train_start(self) -> None:
            self.first = weights(self)
            self.drawn = torch.rand(())

    torch.manual_seed(rank)
    strategy = WeftModelParallelStrategy(plan="auto", layout="dp2,tp2", zero_stage=0)
    model = Unseeded(seed=None)
    trainer(world_size, strategy, tmp_path).fit(model, loader())
    values = torch.cat([*(value.flatten() for value in model.first.values()), model.offset])
    gathered = [torch.empty_like(values) for _ in range(world_size)]
    dist.all_gather(gathered, values)
    assert all(torch.equal(gathered[0], each) for each in gathered)
    draws = [torch.empty(()) for _ in range(world_size)]
    dist.all_gather(draws, model.drawn)
    assert draws[0] == draws[1], "the ranks of a tensor-parallel group must draw equal numbers"
    assert draws[0] != draws[2], "ranks with different data must draw different numbers"


class Metrics(Model):
    def __init__(self) -> None:
        super().__init__()
        self.total, self.values = torchmetrics.SumMetric(), torchmetrics.CatMetric()
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(4, average="micro")
        self.own = torchmetrics.SumMetric(process_group=dist.group.WORLD)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        value = float(self.trainer.strategy.data_axes.rank + 1)
        for metric in (self.total, self.values, self.own):
            metric(value)
        # Data-parallel rank 0 predicts two of four targets, rank 1 three.
        target = torch.arange(4)
        self.accuracy(torch.where(target < value + 1, target, (target + 1) % 4), target)
        self.log_dict({"total": self.total, "accuracy": self.accuracy, "own": self.own})

    def on_validation_epoch_end(self) -> None:
        self.gathered = self.values.compute()


@on_ranks(2, 4)
def test_torchmetrics_count_each_replica_once(rank: int, world_size: int, tmp_path: Path) -> None:
    """With the stock strategy, torchmetrics sums over all ranks, tensor-parallel replicas included."""
    set_torchrun_environment(rank, world_size)
    num_data = world_size // 2
    model = Metrics()
    for _ in range(2):  # state of the first run must not break the second
        strategy = WeftModelParallelStrategy(plan="auto", layout=f"dp{num_data},tp2")
        run = trainer(world_size, strategy, tmp_path)
        [found] = run.validate(model, loader(fixed_data()[:4]), verbose=False)
        assert found["total"] == (1 if num_data == 1 else 1 + 2)
        assert found["own"] == 2 * found["total"], "a metric keeps the process group that its user has passed"
        assert found["accuracy"] == pytest.approx(2 / 4 if num_data == 1 else (2 + 3) / 8)
        assert sorted(model.gathered.flatten().tolist()) == [1.0, 2.0][:num_data]
        model.values.reset()
