"""Peak memory of a rank that trains a Hugging Face Llama under FSDP2 in bf16-mixed: stock Lightning and weft.

    python benchmarks/fsdp_memory.py [--ranks 4] [--columns stock weft] [--small] [--json] [--check]

Each column is a run of three AdamW steps on fresh ranks. `stock` is Lightning's ModelParallelStrategy, whose
`configure_model` calls `fully_shard` for each block and for the model, with bfloat16 parameters and gradients reduced
in float32; the other columns are weft's strategy with the layout dp<ranks>. An allocator counts the tensors of a
process to the byte (docs/memory.md). Figures are those of the rank with the largest peak after the first training step
has begun; "start-up" is the peak before. --check compares weft's peaks with the stock one.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import warnings
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from common import machine_facts, run_on_ranks
from lightning.pytorch.strategies import ModelParallelStrategy
from memory_workloads import NUM_STEPS, RandomBatches
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader

import weft
from weft.lightning import WeftModelParallelStrategy

# Columns of weft, with the options of its strategy.
WEFT: dict[str, dict[str, Any]] = {
    "weft": {},
    "weft_in_backward": {"optimizer_in_backward": True},
    "weft_int8": {"optimizer_state": "int8"},
    "weft_int8_split8_in_backward": {
        "optimizer_state": "int8",
        "master_weights": "split8",
        "optimizer_in_backward": True,
    },
}
COLUMNS = ("stock", *WEFT)
SIZES = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "vocab_size": 8192}
SMALL_SIZES = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3, "vocab_size": 512}
NUM_TOKENS = 128


class Model(L.LightningModule):
    """A Llama; with `shards_itself`, `configure_model` applies FSDP2 as Lightning's documentation shows."""

    def __init__(self, sizes: dict[str, int], shards_itself: bool) -> None:
        super().__init__()
        self.sizes, self.shards_itself = sizes, shards_itself
        self.model: nn.Module | None = None
        self.startup: dict[str, int] = {}

    def configure_model(self) -> None:
        if self.model is not None:
            return
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(1)
        config = LlamaConfig(num_attention_heads=8, num_key_value_heads=4, use_cache=False, **self.sizes)
        self.model = LlamaForCausalLM(config)
        if self.shards_itself:
            mesh = self.device_mesh["data_parallel"]
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            for block in self.model.model.layers:
                fully_shard(block, mesh=mesh, mp_policy=policy)
            fully_shard(self.model, mesh=mesh, mp_policy=policy)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 0:
            self.startup = weft.memory.by_category(at="peak")
            weft.memory.reset_peak()
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=3e-3)


def measure(column: str, sizes: dict[str, int]) -> list[dict[str, Any]]:
    """Train on this rank; return the bytes by category at the peaks of all ranks. Collective."""
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    weft.memory.track()
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(num_ranks))
    if column == "stock":
        strategy: Any = ModelParallelStrategy(data_parallel_size=num_ranks, tensor_parallel_size=1)
    else:
        strategy = WeftModelParallelStrategy(plan="auto", layout=f"dp{num_ranks}", **WEFT[column])
    model = Model(sizes, column == "stock")
    trainer = L.Trainer(
        accelerator="cpu",
        devices=num_ranks,
        strategy=strategy,
        precision="bf16-mixed",
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        use_distributed_sampler=False,
    )
    trainer.fit(model, DataLoader(RandomBatches((1, NUM_TOKENS), sizes["vocab_size"]), batch_size=None))
    assert trainer.global_step == NUM_STEPS
    peaks = {"startup": model.startup, "training": weft.memory.by_category(at="peak")}
    gathered: list[Any] = [None] * num_ranks
    dist.all_gather_object(gathered, peaks)
    return gathered


def row_of(column: str, num_ranks: int, sizes: dict[str, int]) -> dict[str, Any]:
    ranks = run_on_ranks(measure, num_ranks, column, sizes, backend="gloo" if column == "stock" else "cpu:weft")
    most = max(ranks, key=lambda rank: sum(rank["training"].values()))
    return {
        "column": column,
        "num_ranks": num_ranks,
        "startup_bytes": max(sum(rank["startup"].values()) for rank in ranks),
        "training_bytes": sum(most["training"].values()),
        "categories": most["training"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--columns", nargs="+", default=list(COLUMNS), choices=COLUMNS)
    parser.add_argument("--small", action="store_true", help="a small model, which takes seconds")
    parser.add_argument("--json", action="store_true", help="print one JSON object, not a table")
    parser.add_argument("--check", action="store_true", help="fail unless weft's peaks are below the stock one")
    args = parser.parse_args()
    sizes = SMALL_SIZES if args.small else SIZES
    rows = [row_of(column, args.ranks, sizes) for column in args.columns]
    if args.json:
        print(json.dumps({"benchmark": "fsdp_memory", "machine": machine_facts(), "results": rows}, indent=2))
    else:
        print(f"{'column':<30} {'start-up':>9} {'training':>9}  GB; at the training peak")
        for row in rows:
            shown = ", ".join(f"{name} {size / 1e9:.4f}" for name, size in row["categories"].items() if size)
            figures = f"{row['startup_bytes'] / 1e9:9.4f} {row['training_bytes'] / 1e9:9.4f}"
            print(f"{row['column']:<30} {figures}  {shown}")
    return int(args.check and not is_below_stock(rows))


def is_below_stock(rows: list[dict[str, Any]]) -> bool:
    """Return whether each column of weft has a smaller peak than the stock one."""
    peaks = {row["column"]: row["training_bytes"] for row in rows}
    return all(peak < peaks["stock"] for column, peak in peaks.items() if column != "stock")


if __name__ == "__main__":
    sys.exit(main())
