"""What benchmarks/memory.py trains, and by whom: workloads, and strategies as their documentation writes them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from common import FeedForward
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, Dataset

import weft
from weft.lightning import WeftModelParallelStrategy

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from model import ModelArgs, Transformer

NUM_STEPS = 3  # the first makes the optimizer's states, the others are as all that follow


class RandomBatches(Dataset):
    """`[tokens, dim]` normal numbers, or `[sequences, tokens]` token ids, made when they are asked for."""

    def __init__(self, shape: tuple[int, ...], vocab_size: int | None) -> None:
        self.shape, self.vocab_size = shape, vocab_size

    def __len__(self) -> int:
        return NUM_STEPS

    def __getitem__(self, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(index)
        if self.vocab_size is not None:
            return torch.randint(self.vocab_size, self.shape, generator=generator)
        return torch.randn(self.shape, generator=generator)


@dataclass(frozen=True)
class Workload:
    """A model and its batches.

    Attributes:
        build: makes the model.
        batch: shape of a batch.
        vocab_size: of a language model; None: the batch is the model's input, and the loss the sum of its output.
    """

    build: Callable[[], nn.Module]
    batch: tuple[int, ...]
    vocab_size: int | None = None


def workloads(small: bool) -> dict[str, Workload]:
    """By name; the small ones are for a gate that takes seconds."""
    divisor = 32 if small else 1
    args = ModelArgs(dim=64, n_layers=2, n_heads=8, hidden_dim=192) if small else ModelArgs(n_heads=8)
    width = 8192 // divisor
    return {
        "feed_forward": Workload(lambda: FeedForward(width, width), (8, width)),
        "activations": Workload(
            lambda: FeedForward(1024 // divisor, 4096 // divisor), (8192 // divisor, 1024 // divisor)
        ),
        "language_model": Workload(lambda: Transformer(args), (4, args.max_seq_len), args.vocab_size),
    }


class Model(L.LightningModule):
    """As the documentation writes it, with the model made in `configure_model` or before."""

    def __init__(self, workload: Workload, where: str, own_sharding: bool, num_ranks: int) -> None:
        super().__init__()
        self.workload, self.where, self.own_sharding, self.num_ranks = workload, where, own_sharding, num_ranks
        self.model = workload.build() if where == "init" else None
        self.startup: dict[str, int] = {}

    def configure_model(self) -> None:
        if self.model is None:
            with torch.device("meta" if self.where == "meta" else "cpu"):
                self.model = self.workload.build()
        if self.own_sharding and self.num_ranks > 1 and not self.startup:
            _parallelize(self.model, self.device_mesh["tensor_parallel"])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 0:
            self.startup = weft.memory.by_category(at="peak")
            weft.memory.reset_peak()
        if self.workload.vocab_size is None:
            return self.model(batch).sum()
        logits = self.model(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=3e-3)


def _parallelize(model: nn.Module, mesh: Any) -> None:
    """Lightning's documented plan for the feed-forward, for each that the model has."""
    plan = {"w1": ColwiseParallel(), "w3": ColwiseParallel(), "w2": RowwiseParallel()}
    for module in model.modules():
        if all(isinstance(getattr(module, name, None), nn.Linear) for name in plan):
            parallelize_module(module, mesh, plan)


@dataclass(frozen=True)
class Column:
    """Who trains: how the model is made, and by which strategy.

    Attributes:
        where: "init": in the LightningModule's constructor; "configure": in `configure_model`; "meta": there, too, and
            on the meta device.
        strategy: makes it for a number of ranks.
        own_sharding: whether `configure_model` shards.
    """

    where: str
    strategy: Callable[[int], Any]
    own_sharding: bool = False


def _stock(num_ranks: int) -> Any:
    return ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=num_ranks)


COLUMNS = {
    "stock": Column("init", _stock, own_sharding=True),
    "stock_meta": Column("meta", _stock, own_sharding=True),
    "weft": Column("configure", lambda _: WeftModelParallelStrategy(plan="auto")),
    "weft_in_backward": Column(
        "configure", lambda _: WeftModelParallelStrategy(plan="auto", optimizer_in_backward=True)
    ),
    "weft_own_optimizer": Column("configure", lambda _: WeftModelParallelStrategy(plan="auto", fused_optimizers=False)),
}


def train(workload: Workload, column: Column, num_ranks: int) -> dict[str, Any]:
    """Train a few steps on this rank; the peaks before and during training, by category."""
    torch.manual_seed(1)
    model = Model(workload, column.where, column.own_sharding, num_ranks)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=num_ranks,
        strategy=column.strategy(num_ranks),
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        use_distributed_sampler=False,
    )
    batches = RandomBatches(workload.batch, workload.vocab_size)
    trainer.fit(model, DataLoader(batches, batch_size=None))
    return {"startup": model.startup, "training": weft.memory.by_category(at="peak")}
