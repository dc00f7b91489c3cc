"""Options that reduce memory do not change a run's losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from lightning_plugin.scripts.plugin_models import set_torchrun_environment, trainer
from torch import Tensor

from support.models import Llama, LlamaArgs
from support.ranks import on_ranks
from weft.lightning import WeftModelParallelStrategy
from weft.lightning.fabric import WeftModelParallelStrategy as FabricStrategy
from weft.nn.gate_up import are_joined
from weft.strategy import local_of

NUM_STEPS = 8
BASELINE = {"plan": "auto", "fused_optimizers": False, "empty_init": False}
RECOMPUTE = {
    "model.layers.*.feed_forward": {"style": "column_row_mlp", "recompute": True},
    **{f"model.layers.*.attention.w{each}": {"style": "column", "heads": "n_heads"} for each in "q"},
    **{f"model.layers.*.attention.w{each}": {"style": "column", "heads": "n_kv_heads"} for each in "kv"},
    "model.layers.*.attention.wo": "row",
    "model.tok_embeddings": "vocab_embedding",
    "model.output": "column_gather_output",
}
# Options that reorder work or initialize parameters later, without any effect on a bit of the losses.
BITWISE_EQUAL: dict[str, dict[str, Any]] = {
    "empty_init": {"empty_init": True},
    "optimizer_in_backward": {"optimizer_in_backward": True},
    "rows": {"optimizer_in_backward": "rows"},
    "full": {"activation_checkpointing": "full"},
    "selective": {"activation_checkpointing": "selective"},
    "patterns": {"activation_checkpointing": {"model.layers.0": "full", "model.layers.*.attention": "selective"}},
    "recompute": {"plan": RECOMPUTE},
    "all": {"empty_init": True, "optimizer_in_backward": True, "activation_checkpointing": "full", "plan": RECOMPUTE},
}


class Model(pl.LightningModule):
    def __init__(self, optimizer: str = "AdamW") -> None:
        super().__init__()
        self.model: Llama | None = None
        self.optimizer = optimizer
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.model is None:
            torch.manual_seed(3)
            self.model = Llama(LlamaArgs())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self.model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return getattr(torch.optim, self.optimizer)(self.parameters(), lr=3e-3 if self.optimizer == "AdamW" else 0.05)


def _batches() -> torch.utils.data.DataLoader:
    tokens = torch.randint(37, (4 * NUM_STEPS, 13), generator=torch.Generator().manual_seed(1))
    return torch.utils.data.DataLoader(tokens, batch_size=4)


def _losses(world_size: int, folder: Path, optimizer: str, **options: Any) -> list[float]:
    model = Model(optimizer)
    trainer(world_size, WeftModelParallelStrategy(**{**BASELINE, **options}), folder).fit(model, _batches())
    assert len(model.losses) == NUM_STEPS and model.losses[-1] < model.losses[0]
    return model.losses


@on_ranks(1, 2, timeout=300, keeps_groups=True)
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_losses_match_baseline(rank: int, world_size: int, tmp_path: Path, optimizer: str) -> None:
    set_torchrun_environment(rank, world_size)
    expected = _losses(world_size, tmp_path, optimizer)
    for name, options in BITWISE_EQUAL.items():
        assert _losses(world_size, tmp_path, optimizer, **options) == expected, name
    fused = _losses(world_size, tmp_path, optimizer, fused_optimizers=True)
    assert fused == pytest.approx(expected, rel=1e-6, abs=0)
    for name, options in BITWISE_EQUAL.items():
        assert _losses(world_size, tmp_path, optimizer, fused_optimizers=True, **options) == fused, name


@on_ranks(2, keeps_groups=True)
def test_joined_weights_train_to_the_same_losses(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    expected = _losses(world_size, tmp_path, "SGD")
    for options in ({}, {"optimizer_in_backward": "rows"}, {"plan": RECOMPUTE, "empty_init": True}):
        model = Model("SGD")
        strategy = WeftModelParallelStrategy(**{**BASELINE, **options}, join_gate_up=True)
        trainer(world_size, strategy, tmp_path).fit(model, _batches())
        assert model.losses == pytest.approx(expected, rel=1e-5, abs=0), options
        layers = model.model.layers
        joined = [
            are_joined(local_of(each.feed_forward.w1.weight), local_of(each.feed_forward.w3.weight)) for each in layers
        ]
        assert joined == [True] * len(layers), options


@on_ranks(2, keeps_groups=True)
def test_joined_weights_under_fabric(rank: int, world_size: int) -> None:
    set_torchrun_environment(rank, world_size)
    results = []
    for joins in (False, True):
        torch.manual_seed(0)
        fabric = Fabric(accelerator="cpu", devices=world_size, strategy=FabricStrategy(plan="auto", join_gate_up=joins))
        fabric.launch()
        model = fabric.setup(Llama(LlamaArgs()))
        mlp = model.layers[0].feed_forward
        assert are_joined(local_of(mlp.w1.weight), local_of(mlp.w3.weight)) == joins
        fabric.backward(model(torch.arange(36).view(3, 12)).square().mean())
        results.append([p.grad.to_local() for p in model.parameters()])
    for joined, separate in zip(*results, strict=True):
        torch.testing.assert_close(joined, separate, rtol=1e-4, atol=1e-7)


@on_ranks(2, keeps_groups=True)
def test_join_gate_up_raises_where_it_has_no_effect(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    with pytest.raises(ValueError, match="join_gate_up=True without a plan that fuses MLPs; pass plan='auto'"):
        WeftModelParallelStrategy(join_gate_up=True)
    strategy = WeftModelParallelStrategy(plan="auto", data_parallel_size=2, join_gate_up=True)
    with pytest.raises(ValueError, match=r"join_gate_up=True with 2 data-parallel ranks.*pass zero_stage=1 or 0"):
        trainer(world_size, strategy, tmp_path).fit(Model(), _batches())
    strategy = WeftModelParallelStrategy(plan={"*": "replicate"}, join_gate_up=True)
    with pytest.raises(ValueError, match="none of the model's MLPs can be joined: an MLP must be gated"):
        trainer(world_size, strategy, tmp_path).fit(Model(), _batches())
    strategy = WeftModelParallelStrategy(plan="auto", join_gate_up=True)
    with pytest.raises(ValueError, match="precision='bf16-mixed', which multiplies with separate copies"):
        trainer(world_size, strategy, tmp_path, precision="bf16-mixed").fit(Model(), _batches())


@on_ranks(2)
def test_fabric_activation_checkpointing_keeps_gradients(rank: int, world_size: int) -> None:
    set_torchrun_environment(rank, world_size)
    gradients = []
    for policy in ("none", "selective"):
        torch.manual_seed(0)
        strategy = FabricStrategy(plan="auto", activation_checkpointing=policy)
        fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy)
        fabric.launch()
        model = fabric.setup(Llama(LlamaArgs()))
        names = [name for name, _ in model.named_parameters()]
        assert not any("checkpoint" in name for name in names)
        fabric.backward(model(torch.arange(36).view(3, 12)).square().mean())
        gradients.append([p.grad.to_local() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@on_ranks(2)
def test_offload_on_cpu_raises(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    strategy = WeftModelParallelStrategy(plan="auto", activation_checkpointing="full", activation_offload=True)
    with pytest.raises(ValueError, match="activation_offload=True on CPU devices"):
        trainer(world_size, strategy, tmp_path).fit(Model(), _batches())
    for plan in ({"*": {"style": "replicate", "offload": True}}, lambda *_: {"style": "replicate", "offload": True}):
        with pytest.raises(ValueError, match="a rule of its plan with offload on CPU devices"):
            trainer(world_size, WeftModelParallelStrategy(plan=plan), tmp_path).fit(Model(), _batches())
