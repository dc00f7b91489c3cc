"""ThroughputMonitor and MemoryMonitor: rates by a clock that the tests set, and memory that `weft.memory` counts."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import DDPStrategy
from lightning_plugin.scripts.plugin_models import (
    BATCH,
    DIM,
    Model,
    fixed_data,
    loader,
    set_torchrun_environment,
    trainer,
)
from ops.memory.counting import counted
from torch import Tensor, nn

import weft
from support.ranks import on_ranks
from weft import _memory
from weft.lightning import MemoryMonitor, ThroughputMonitor, WeftModelParallelStrategy

STEP_SECONDS = 0.25
NAMESPACES = {"weft.lightning": lightning.pytorch, "weft.pytorch_lightning": pytorch_lightning}


class MetricsLogger(Logger):
    """Stores the metrics that are logged."""

    name = version = "memo"

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def rows_of(self, prefix: str) -> list[tuple[int, dict[str, float]]]:
        """Return the step and metrics of each row, with only the names that begin with `prefix`."""
        chosen = [(step, {n: v for n, v in row.items() if n.startswith(prefix)}) for step, row in self.rows]
        return [(step, row) for step, row in chosen if row]


class Timed(Model):
    """Sets the monitor's clock: every training batch takes STEP_SECONDS, and a validation far longer."""

    def __init__(self, monitor: Any) -> None:
        super().__init__()
        self.seconds = 1000.0
        monitor._clock = lambda: self.seconds

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seconds += STEP_SECONDS
        return super().training_step(batch if isinstance(batch, Tensor) else batch["x"], batch_idx)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.seconds += 1e6


def _fit(rank: int, world_size: int, folder: Path, monitor: Any, strategy: Any, **options: Any) -> MetricsLogger:
    set_torchrun_environment(rank, world_size)
    logger = MetricsLogger()
    data = options.pop("data", None) or loader()
    settings = {"logger": logger, "callbacks": [monitor], "log_every_n_steps": 2, "max_epochs": 2, **options}
    trainer(world_size, strategy, folder, **settings).fit(Timed(monitor), data, loader(fixed_data()[:4]))
    return logger


@on_ranks(4)
@pytest.mark.parametrize(("layout", "num_data"), [("dp2,tp2", 2), ("dp4", 4), ("tp4", 1), ("rep2,tp2", 2)])
def test_each_replica_counts_once(rank: int, world_size: int, tmp_path: Path, layout: str, num_data: int) -> None:
    """Even data-parallel ranks have batches of 4 samples, odd ones of 2."""
    data_rank = rank // (world_size // num_data)
    sizes = [4 if each % 2 == 0 else 2 for each in range(num_data)]
    monitor = ThroughputMonitor(
        length_fn=lambda batch: batch.numel(), flops_per_sample=lambda batch: 5.0 * batch.shape[1], peak_flops=1000.0
    )
    data = torch.utils.data.DataLoader(fixed_data(), batch_size=sizes[data_rank])
    strategy = WeftModelParallelStrategy(plan="auto", layout=layout, zero_stage=1, check_batches=0)
    logger = _fit(rank, world_size, tmp_path, monitor, strategy, data=data, limit_train_batches=6)
    samples = sum(sizes) / STEP_SECONDS
    rates = {"samples": samples, "tokens": DIM * samples, "flops": 5 * DIM * samples}
    expected = {f"throughput/{name}_per_second": rate for name, rate in rates.items()}
    expected |= {f"throughput/device/{name}_per_second": rate / 4 for name, rate in rates.items()}
    expected["throughput/mfu"] = rates["flops"] / 4 / 1000
    assert logger.rows_of("throughput/") == [(step, expected) for step in (1, 3, 5, 7, 9, 11)]


@on_ranks(2)
def test_throughput_of_other_strategies(rank: int, world_size: int, tmp_path: Path) -> None:
    monitor = ThroughputMonitor(batch_size_fn=len, flops_per_sample=8)
    logger = _fit(rank, world_size, tmp_path, monitor, DDPStrategy(process_group_backend="cpu:weft"))
    rates = {"samples": 2 * BATCH / STEP_SECONDS, "flops": 8 * 2 * BATCH / STEP_SECONDS}
    expected = {f"throughput/{name}_per_second": rate for name, rate in rates.items()}
    expected |= {f"throughput/device/{name}_per_second": rate / 2 for name, rate in rates.items()}
    assert logger.rows_of("throughput/")[-1] == (11, expected)


@pytest.mark.parametrize("name", NAMESPACES)
def test_monitors_run_in_each_namespace(name: str, tmp_path: Path) -> None:
    module, namespace = importlib.import_module(name), NAMESPACES[name]
    for callback in (module.ThroughputMonitor, module.MemoryMonitor):
        assert issubclass(callback, namespace.Callback)
        assert callback.__module__ == name

    class Scaled(namespace.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(DIM, dtype=torch.float64))

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return (batch * self.scale).sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    throughput, memory = module.ThroughputMonitor(), module.MemoryMonitor()
    with counted():
        run = namespace.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            logger=False,
            log_every_n_steps=3,
            callbacks=[throughput, memory],
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            default_root_dir=tmp_path,
        )
        run.fit(Scaled(), loader())
    assert run.callback_metrics["throughput/samples_per_second"] > 0
    assert [row["rank"] for row in memory.table()] == [0]


class Slowing(Timed):
    """Step i takes i seconds; the first step is 1."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seconds += batch_idx + 1 - STEP_SECONDS
        return super().training_step(batch, batch_idx)


@on_ranks(1)
def test_window_advances_by_logging_interval(rank: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, 1)
    for window_size, starts in ((4, [0, 0, 2]), (3, [0, 0, 2]), (1, [0, 2, 4]), (100, [0, 0, 0])):
        logger, monitor = MetricsLogger(), ThroughputMonitor(window_size=window_size)
        run = trainer(1, "weft", tmp_path, logger=logger, callbacks=[monitor], log_every_n_steps=2)
        run.fit(Slowing(monitor), loader())
        found = [row["throughput/samples_per_second"] for _, row in logger.rows_of("throughput/")]
        ends = [2, 4, 6]
        seconds = [sum(range(start + 1, end + 1)) for start, end in zip(starts, ends, strict=True)]
        steps = [end - start for start, end in zip(starts, ends, strict=True)]
        assert found == [BATCH * n / s for n, s in zip(steps, seconds, strict=True)]


@on_ranks(1)
def test_accumulated_batches_count_once_per_step(rank: int, tmp_path: Path) -> None:
    monitor = ThroughputMonitor()
    options = {"accumulate_grad_batches": 3, "log_every_n_steps": 1, "max_epochs": 1}
    logger = _fit(rank, 1, tmp_path, monitor, "weft", **options)
    rate = BATCH / STEP_SECONDS
    expected = {"throughput/samples_per_second": rate, "throughput/device/samples_per_second": rate}
    assert logger.rows_of("throughput/") == [(0, expected), (1, expected)]
    losses = [step for step, row in logger.rows if "train_loss" in row]
    assert losses == [0, 1], "the monitor must log at the steps at which Lightning logs"


@on_ranks(1)
def test_batch_size_is_found_in_nested_batches(rank: int, tmp_path: Path) -> None:
    batches = [{"name": "a", "scale": torch.tensor(2.0), "x": batch} for batch in fixed_data().split(BATCH)]
    data = torch.utils.data.DataLoader(batches, batch_size=None)
    logger = _fit(rank, 1, tmp_path, ThroughputMonitor(), "weft", data=data)
    assert logger.rows_of("throughput/")[0][1]["throughput/samples_per_second"] == BATCH / STEP_SECONDS
    from weft._plugin.throughput_monitor import first_dim

    with pytest.raises(ValueError, match=r"a batch of type dict without a tensor .*; pass batch_size_fn"):
        first_dim({"scale": torch.tensor(2.0)})


class Wide(lightning.pytorch.LightningModule):
    """Large enough for the peak to be in a training step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(256, 512, bias=False), nn.ReLU(), nn.Linear(512, 256, bias=False))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


WIDE_BYTES = 2 * 256 * 512 * 4


@on_ranks(4)
@pytest.mark.parametrize("every_n_steps", [None, 4])
def test_memory_matches_count(rank: int, world_size: int, tmp_path: Path, every_n_steps: int | None) -> None:
    set_torchrun_environment(rank, world_size)
    logger, monitor = MetricsLogger(), MemoryMonitor(every_n_steps)
    with counted():
        padding = torch.zeros(1000 * (rank + 1))  # so that the ranks' peaks differ
        strategy = WeftModelParallelStrategy(plan="auto", layout="dp2,tp2")
        run = trainer(world_size, strategy, tmp_path, logger=logger, callbacks=[monitor], max_epochs=2)
        with pytest.raises(RuntimeError, match="has not logged yet"):
            monitor.table()
        run.fit(Wide(), loader(torch.randn(24, 256)))
        mine = weft.memory.by_category(at="peak")
        del padding
    table = monitor.table()
    assert table[rank] == {"rank": rank, "total": sum(mine.values()), **mine}
    tables: list[Any] = [None] * world_size
    dist.all_gather_object(tables, table)
    assert all(each == table for each in tables)
    largest = {f"memory/{name}": max(row[name] for row in table) for name in ("total", *mine)}
    assert {name: run.callback_metrics[name].item() for name in largest} == largest
    if rank == 0:
        assert [step for step, _ in logger.rows_of("memory/")] == ([5, 11] if every_n_steps is None else [3, 7, 11])
        assert logger.rows_of("memory/")[-1][1] == largest
    assert len({row["total"] for row in table}) == world_size
    assert table[rank]["optimizer_state"] >= 2 * WIDE_BYTES // world_size


@on_ranks(2)
def test_memory_categories_of_other_strategies(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    monitor = MemoryMonitor()
    with counted():
        before = weft.memory.by_category()
        model = Wide()
        strategy = DDPStrategy(process_group_backend="cpu:weft")
        trainer(world_size, strategy, tmp_path, callbacks=[monitor]).fit(model, loader(torch.randn(24, 256)))
    peak = {name: monitor.table()[rank][name] - before[name] for name in before}
    assert peak["parameters"] == peak["gradients"] == WIDE_BYTES
    assert peak["optimizer_state"] >= 2 * WIDE_BYTES
    assert not model.layers[0].weight._post_accumulate_grad_hooks


class Untracked(Wide):
    """A model whose layers the count has not seen, as if it was built before the count began.

    The count has seen only the scale, which has two names, and the offset.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers.share_memory()  # the allocator does not see shared memory
        self.scale = self.tied = nn.Parameter(torch.ones(256))
        self.register_buffer("offset", torch.zeros(256))
        self.register_buffer("untracked_offset", torch.zeros(256).share_memory_())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch * self.scale + self.offset + self.untracked_offset, batch_idx)


@on_ranks(2)
@pytest.mark.parametrize("plan", ["auto", "replicate", "ddp"])
def test_memory_of_untracked_parameters(rank: int, world_size: int, tmp_path: Path, plan: str) -> None:
    set_torchrun_environment(rank, world_size)
    logger, monitor = MetricsLogger(), MemoryMonitor()
    with counted():
        before = weft.memory.by_category()["parameters"]
        model = Untracked()
        untracked = [*model.layers.parameters(), model.untracked_offset]
        assert not any(_memory.set_category(tensor, "parameters") for tensor in untracked)
        strategy: Any = DDPStrategy(process_group_backend="cpu:weft")
        if plan != "ddp":
            strategy = WeftModelParallelStrategy(plan="auto" if plan == "auto" else {"layers": "replicate"})
        run = trainer(world_size, strategy, tmp_path, logger=logger, callbacks=[monitor])
        run.fit(model, loader(torch.randn(24, 256)))
    expected = WIDE_BYTES // (world_size if plan == "auto" else 1) + 3 * 256 * 4
    held_before: list[Any] = [None] * world_size  # ranks that earlier tests used may hold different numbers of bytes
    dist.all_gather_object(held_before, before)
    assert [row["parameters"] for row in monitor.table()] == [expected + held for held in held_before]
    if rank == 0:
        assert logger.rows_of("memory/")[-1][1]["memory/parameters"] == expected + max(held_before)
    assert sum(monitor.table()[rank][name] for name in weft.memory.CATEGORIES) == monitor.table()[rank]["total"]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ThroughputMonitor(peak_flops=1e12), r"flops_per_sample=None; pass the positive flops"),
        (lambda: ThroughputMonitor(peak_flops=0, flops_per_sample=1), r"peak_flops=0 with"),
        (lambda: ThroughputMonitor(window_size=0), r"window_size=0; pass a number of steps from 1 on"),
        (lambda: MemoryMonitor(every_n_steps=0), r"MemoryMonitor got every_n_steps=0"),
        (lambda: MemoryMonitor(True), r"every_n_steps=True"),
    ],
)
def test_invalid_settings_raise(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()
