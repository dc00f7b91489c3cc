"""The workloads and configurations of benchmarks/memory.py; each strategy is used as its documentation shows."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from common import FeedForward
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, Dataset

import weft
import weft.strategy.apply  # strategies load these modules at first use; forked ranks inherit them
import weft.strategy.data_parallel
import weft.strategy.full_results
import weft.strategy.pipeline
import weft.strategy.verification.decide
from weft.lightning import WeftModelParallelStrategy
from weft.strategy._plan import DecoderModel, FeedForwardModel, Mesh, TrainingSpec
from weft.strategy.planning.plan_text import from_mapping

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from model import ModelArgs, Transformer

NUM_STEPS = 2  # the first step creates the optimizer's states, the second is like all later ones


class RandomBatches(Dataset):
    """`[tokens, dim]` normal numbers, or `[sequences, tokens]` token ids, generated on access."""

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
        build: builds the model.
        batch: shape of a batch.
        spec: describes the model to the memory model, from which `weft estimate` predicts.
        vocab_size: of a language model; None: the model is a feed-forward, and the loss is the sum of its output.
    """

    build: Callable[[], nn.Module]
    batch: tuple[int, ...]
    spec: FeedForwardModel | DecoderModel
    vocab_size: int | None = None

    @property
    def has_blocks(self) -> bool:
        return self.vocab_size is not None

    def recomputing_plan(self, of_spec: bool) -> dict[str, Any]:
        """Return the plan that "auto" chooses, changed so that MLPs save only their input.

        `of_spec`: with the module names of `spec` instead of the model's.
        """
        mlp = {"style": "column_row_mlp", "recompute": True}
        if not self.has_blocks:
            return {"" if of_spec else "model": mlp}
        block = "model.layers.*"
        if of_spec:
            projections = {f"{block}.self_attn.{name}_proj": "column" for name in "qkv"}
            ends = {f"{block}.self_attn.o_proj": "row", "model.embed_tokens": "vocab_embedding"}
            ends["lm_head"] = "column_gather_output"
            return {f"{block}.mlp": mlp, **projections, **ends}
        headed = {f"{block}.attention.w{name}": {"style": "column", "heads": "n_heads"} for name in "qkv"}
        ends = {f"{block}.attention.wo": "row", "model.tok_embeddings": "vocab_embedding"}
        ends["model.output"] = "column_gather_output"
        return {f"{block}.feed_forward": mlp, **headed, **ends}


def workloads(small: bool) -> dict[str, Workload]:
    """Return the workloads by name; the small ones are for a gate that takes seconds."""
    divisor = 32 if small else 1
    args = ModelArgs(dim=64, n_layers=2, n_heads=8, hidden_dim=192) if small else ModelArgs(n_heads=8)
    width, dim, hidden_dim = 8192 // divisor, 1024 // divisor, 4096 // divisor
    decoder = DecoderModel(
        dim=args.dim,
        hidden_dim=args.hidden_dim,
        num_layers=args.n_layers,
        num_heads=args.n_heads,
        num_kv_heads=args.n_heads,
        head_dim=args.dim // args.n_heads,
        vocab_size=args.vocab_size,
        max_tokens=args.max_seq_len,
    )
    return {
        "feed_forward": Workload(
            lambda: FeedForward(width, width), (8, width), FeedForwardModel(dim=width, hidden_dim=width)
        ),
        "activations": Workload(
            lambda: FeedForward(dim, hidden_dim),
            (8192 // divisor, dim),
            FeedForwardModel(dim=dim, hidden_dim=hidden_dim),
        ),
        "language_model": Workload(lambda: Transformer(args), (4, args.max_seq_len), decoder, args.vocab_size),
    }


@dataclass(frozen=True)
class Meter:
    """Reads peaks: on the CPU weft's count by category, on CUDA the allocated and reserved bytes of torch."""

    device: str  # "cpu" or "cuda"

    def take(self) -> dict[str, int]:
        """Return the peak in bytes since the last call, or since the start."""
        if self.device == "cpu":
            peak = weft.memory.by_category(at="peak")
        else:
            peak = {"allocated": weft.memory.peak("cuda"), "reserved": weft.memory.peak_reserved("cuda")}
        weft.memory.reset_peak(self.device)
        return peak


class Model(L.LightningModule):
    """A LightningModule that builds the model as `where` says and, with `shards_itself`, applies Lightning's plan.

    `where`: as in `Configuration`.
    """

    def __init__(self, workload: Workload, where: str, shards_itself: bool, num_ranks: int, meter: Meter) -> None:
        super().__init__()
        self.workload, self.where, self.shards_itself, self.num_ranks = workload, where, shards_itself, num_ranks
        self.meter = meter
        self.model = workload.build() if where == "init" else None
        self.startup: dict[str, int] = {}

    def configure_model(self) -> None:
        if self.model is None:
            with torch.device("meta") if self.where == "meta" else nullcontext():
                self.model = self.workload.build()
        if self.shards_itself and self.num_ranks > 1 and not self.startup:
            _parallelize(self.model, self.device_mesh["tensor_parallel"])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 0:
            self.startup = self.meter.take()
        if self.workload.vocab_size is None:
            return self.model(batch).sum()
        logits = self.model(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if not self.shards_itself:
            return torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        # On CUDA torch steps a parameter group with one call, which does not support DTensors with plain tensors.
        plain = [each for each in self.model.parameters() if not isinstance(each, DTensor)]
        sharded = [each for each in self.model.parameters() if isinstance(each, DTensor)]
        return torch.optim.AdamW([{"params": each} for each in (plain, sharded) if each], lr=3e-3)


def _parallelize(model: nn.Module, mesh: Any) -> None:
    """Apply Lightning's documented plan to each feed-forward of the model."""
    plan = {"w1": ColwiseParallel(), "w2": RowwiseParallel(), "w3": ColwiseParallel()}
    for module in model.modules():
        if all(isinstance(getattr(module, name, None), nn.Linear) for name in plan):
            parallelize_module(module, mesh, plan)


@dataclass(frozen=True)
class Configuration:
    """A configuration to measure: a strategy, and how the model is built.

    Attributes:
        where: "init": in the LightningModule's constructor; "configure": in `configure_model`; "meta": in
            `configure_model`, on the meta device.
        options: arguments of weft's strategy; None: Lightning's strategy, and `configure_model` shards the model.
        recomputes: whether MLPs save only their input.
        wants_blocks: whether the configuration is for models with blocks only.
        precision: of the Trainer.
        is_for_small: whether small models are measured, too; the scratch of bfloat16 products, which the memory model
            does not predict, is a large share of their memory.
    """

    where: str
    options: dict[str, Any] | None
    recomputes: bool = False
    wants_blocks: bool = False
    precision: str = "32-true"
    is_for_small: bool = True

    def strategy(self, workload: Workload, num_ranks: int) -> Any:
        if self.options is None:
            return ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=num_ranks)
        plan = workload.recomputing_plan(of_spec=False) if self.recomputes else "auto"
        return WeftModelParallelStrategy(plan=plan, tensor_parallel_size=num_ranks, **self.options)

    def is_for(self, workload: Workload) -> bool:
        return workload.has_blocks or not self.wants_blocks


CONFIGURATIONS = {
    "stock": Configuration("init", None),
    "stock_meta": Configuration("meta", None),
    "weft": Configuration("configure", {}),
    "weft_in_backward": Configuration("configure", {"optimizer_in_backward": True}),
    "weft_by_rows": Configuration("configure", {"optimizer_in_backward": "rows"}),
    "weft_int8": Configuration("configure", {"optimizer_in_backward": "rows", "optimizer_state": "int8"}),
    "weft_int8_split8": Configuration(
        "configure",
        {"optimizer_in_backward": "rows", "optimizer_state": "int8", "master_weights": "split8"},
        precision="bf16-mixed",
        is_for_small=False,
    ),
    "weft_own_optimizer": Configuration("configure", {"fused_optimizers": False}),
    "weft_recompute": Configuration("configure", {}, recomputes=True),
    "weft_selective": Configuration("configure", {"activation_checkpointing": "selective"}, wants_blocks=True),
    "weft_checkpointed": Configuration("configure", {"activation_checkpointing": "full"}, wants_blocks=True),
}


def predicted(
    workload: Workload, configuration: Configuration, num_ranks: int, device: str = "cpu"
) -> dict[str, dict[str, int]]:
    """Return the predicted bytes by phase and category, of the rank with the most.

    The memory model does not cover DTensor's operations. So for Lightning's strategy the prediction is an estimate: it
    assumes weft's operators with Lightning's plan and optimizer.
    """
    if workload.has_blocks:
        sequences, tokens = workload.batch[0], workload.batch[1] - 1  # the last token of a sequence is only a target
    else:
        sequences, tokens = workload.batch[0], 1
    plan, options = None, configuration.options
    if configuration.recomputes:
        plan = from_mapping(workload.recomputing_plan(of_spec=True))
    if options is None:
        names = ("gate_proj", "up_proj", "down_proj") if workload.has_blocks else ("w1", "w3", "w2")
        prefix = "model.layers.*.mlp." if workload.has_blocks else ""
        plan = from_mapping(dict(zip((prefix + name for name in names), ("column", "column", "row"), strict=True)))
        options = {"fused_optimizers": False, "empty_init": configuration.where == "meta"}
    spec = TrainingSpec(
        workload.spec,
        Mesh([("tensor_parallel", num_ranks)]),
        plan=plan,
        sequences=sequences,
        tokens=tokens,
        device=device,
        precision=configuration.precision,
        **options,
    )
    return max((spec.predict(rank) for rank, _ in spec.distinct_ranks()), key=training_peak)


def training_peak(phases: dict[str, dict[str, int]]) -> int:
    return max(sum(usage.values()) for name, usage in phases.items() if name != "init")


def train(
    workload: Workload, configuration: Configuration, num_ranks: int, device: str = "cpu", is_simulated: bool = False
) -> dict[str, Any]:
    """Train a few steps on this rank; return the peaks before and during training.

    `is_simulated`: the other ranks are simulated, and each rank is a node to Lightning, because there is one device.
    """
    torch.manual_seed(1)
    meter = Meter(device)
    model = Model(workload, configuration.where, configuration.options is None, num_ranks, meter)
    trainer = L.Trainer(
        accelerator=device,
        devices=1 if is_simulated else num_ranks,
        num_nodes=num_ranks if is_simulated else 1,
        strategy=configuration.strategy(workload, num_ranks),
        precision=configuration.precision,
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        use_distributed_sampler=False,
    )
    batches = RandomBatches(workload.batch, workload.vocab_size)
    trainer.fit(model, DataLoader(batches, batch_size=None))
    return {"startup": model.startup, "training": meter.take()}
