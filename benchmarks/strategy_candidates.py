"""The candidates of benchmarks/strategy_step.py: they train a small Llama under the Trainer, some steps per message."""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.strategies import ModelParallelStrategy
from memory_workloads import RandomBatches
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

import weft
from weft.lightning import MemoryMonitor, WeftModelParallelStrategy

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from model import ModelArgs, Transformer

LAYOUTS = {"tp2": (1, 2), "dp2": (2, 1), "dp2,tp2": (2, 2)}  # data-parallel ranks, tensor-parallel ranks
NUM_WARM_UP = 2  # steps; the first creates the optimizer's states


@dataclass(frozen=True)
class Size:
    """Sizes of a model, the tokens of a batch (two sequences on all ranks together) and the steps of a sample."""

    dim: int
    num_tokens: int
    steps_per_sample: int
    num_layers: int = 4

    @property
    def args(self) -> ModelArgs:
        return ModelArgs(
            dim=self.dim, n_layers=self.num_layers, n_heads=8, hidden_dim=3 * self.dim, max_seq_len=self.num_tokens // 2
        )


SIZES = {size.dim: size for size in (Size(128, 256, 10), Size(512, 1024, 1), Size(1024, 2048, 1))}


@dataclass(frozen=True)
class Candidate:
    """A strategy and the default group's backend; `options`: for weft's strategy; None: ModelParallelStrategy."""

    backend: str
    options: dict[str, Any] | None

    def strategy(self, layout: str) -> Any:
        if self.options is None:
            num_data, num_tensor = LAYOUTS[layout]
            return ModelParallelStrategy(data_parallel_size=num_data, tensor_parallel_size=num_tensor)
        return WeftModelParallelStrategy(plan="auto", layout=layout, **self.options)


CANDIDATES = {
    "stock": Candidate("gloo", None),
    "weft": Candidate("cpu:weft", {}),
    "weft_on_gloo": Candidate("gloo", {"process_group_backend": "gloo"}),
    "weft_own_optimizer": Candidate("cpu:weft", {"fused_optimizers": False}),
}


def shard_as_documented(model: Transformer, mesh: DeviceMesh) -> None:
    data, tensor = mesh["data_parallel"], mesh["tensor_parallel"]
    if tensor.size() > 1:
        for block in model.layers:
            names = {"attention": (("wq", "wk", "wv"), "wo"), "feed_forward": (("w1", "w3"), "w2")}
            plan: dict[str, Any] = {}
            for layer, (columns, row) in names.items():
                plan |= {f"{layer}.{name}": ColwiseParallel() for name in columns}
                plan[f"{layer}.{row}"] = RowwiseParallel()
            block.attention.n_heads //= tensor.size()
            parallelize_module(block, tensor, plan)
    if data.size() > 1:
        for index, block in enumerate(model.layers):
            fully_shard(block, mesh=data, reshard_after_forward=index < len(model.layers) - 1)
        fully_shard(model, mesh=data)


class LanguageModel(L.LightningModule):
    """Builds the model in `configure_model` and, for Lightning's strategy (`shards_itself`), shards it there."""

    def __init__(self, size: Size, layout: str, shards_itself: bool) -> None:
        super().__init__()
        self.size, self.shards_itself = size, shards_itself
        self.num_data, self.num_tensor = LAYOUTS[layout]
        self.model: nn.Module | None = None
        self.losses: list[Tensor] = []

    def configure_model(self) -> None:
        if self.model is None:
            torch.manual_seed(1)
            self.model = Transformer(self.size.args)
            if self.shards_itself:
                assert self.device_mesh is not None
                shard_as_documented(self.model, self.device_mesh)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        assert self.model is not None
        ids = batch.chunk(self.num_data)[self.global_rank // self.num_tensor]
        loss = F.cross_entropy(self.model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class StepServer(L.Callback):
    """Receives a number of steps, lets the Trainer run as many, sends their seconds and losses, and receives again."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.num_left = 0
        self.start = 0.0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if self.num_left == 0:
            self.num_left = self.connection.recv()
            if weft.memory.is_tracking() and batch_idx == NUM_WARM_UP:
                weft.memory.reset_peak()
            dist.barrier()
            self.start = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.num_left -= 1
        if self.num_left == 0:
            self.connection.send((time.perf_counter() - self.start, [loss.item() for loss in module.losses]))
            module.losses.clear()


class Steps(RandomBatches):
    """A data set of `num_steps` batches."""

    def __init__(self, size: Size, num_steps: int) -> None:
        super().__init__((2, size.args.max_seq_len + 1), size.args.vocab_size)
        self.num_steps = num_steps

    def __len__(self) -> int:
        return self.num_steps


def train(
    connection: Connection, candidate: Candidate, size: Size, layout: str, num_steps: int, counts_memory: bool
) -> None:
    """Run the Trainer on this rank; answer the last message with the memory monitor's table, or None."""
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(num_ranks))
    monitor = MemoryMonitor()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=num_ranks,
        strategy=candidate.strategy(layout),
        max_epochs=1,
        logger=False,
        callbacks=[StepServer(connection), monitor] if counts_memory else [StepServer(connection)],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        use_distributed_sampler=False,
    )
    trainer.fit(
        LanguageModel(size, layout, candidate.options is None), DataLoader(Steps(size, num_steps), batch_size=None)
    )
    connection.recv()
    connection.send(monitor.table() if counts_memory else None)
