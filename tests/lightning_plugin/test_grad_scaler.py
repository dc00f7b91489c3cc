"""Gradient scalers of "16-mixed": all ranks leave out a step if a gradient overflowed on one of them.

Autocast leaves float64 models as they are, so that results equal those of one device.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision as FabricMixedPrecision
from lightning.pytorch.plugins import MixedPrecision
from lightning_plugin.scripts.pipeline_models import CUTS, Text, pipeline_strategy, text_loader
from lightning_plugin.scripts.plugin_models import set_torchrun_environment, trainer, weights
from torch import nn
from torch.amp import GradScaler

from support.parity import full
from support.ranks import on_ranks, run_on_ranks
from weft.lightning import WeftModelParallelStrategy
from weft.lightning.fabric import WeftModelParallelStrategy as FabricStrategy
from weft.strategy import agree_on_overflow
from weft.strategy.data_parallel.local import local_shard


class Overflowing(GradScaler):
    """The largest gradient of the last rank overflows in the second step."""

    def __init__(self) -> None:
        super().__init__("cpu", init_scale=1024.0, growth_interval=2)
        self.num_steps = 0

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        is_last = not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1
        if is_last and self.num_steps == 1:
            gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            local_shard(max(gradients, key=torch.Tensor.numel))[0].fill_(torch.inf)
        self.num_steps += 1
        super().unscale_(optimizer)


def fit(rank: int, world_size: int, folder: str, layout: str, options: dict[str, Any], **settings: Any) -> Any:
    """Return the weights, the scale and the number of steps; the layout "auto" is one device without weft."""
    set_torchrun_environment(rank, world_size)
    if layout == "auto":
        strategy: Any = "auto"
    elif "pp" in layout:
        strategy = pipeline_strategy(layout, **options)
    else:
        strategy = WeftModelParallelStrategy(plan="auto", layout=layout, **options)
    plugin = MixedPrecision("16-mixed", "cpu", Overflowing())
    model = Text()
    run = trainer(world_size, strategy, folder, max_epochs=2, plugins=[plugin], **settings)
    data_ranks = 2 if "dp2" in layout else 1
    run.fit(model, text_loader(rank=rank % data_ranks, num_ranks=data_ranks))
    return weights(model), plugin.scaler.get_scale(), run.global_step


LAYOUTS = [
    (2, "tp2", {}),
    (2, "dp2", {"zero_stage": 3}),
    (2, "dp2", {"zero_stage": 1}),
    (2, "pp2", {}),
    (4, "pp2,tp2", {"pipeline_schedule": "zero_bubble"}),
    (2, "pp2", {"pipeline_schedule": "zbv", "pipeline_cuts": CUTS[4]}),
]


@pytest.mark.parametrize("clipped", [False, True])
def test_all_ranks_leave_out_steps_of_one_device(tmp_path: Any, clipped: bool) -> None:
    settings: dict[str, Any] = {"folder": str(tmp_path)}
    if clipped:
        settings |= {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    [(expected, scale, steps)] = run_on_ranks(1, fit, layout="auto", options={}, **settings)
    # The overflow halves the scale, and each two steps after it double the scale.
    assert (scale, steps) == ((1024.0, 4) if clipped else (2048.0, 6))
    for world_size, layout, options in LAYOUTS:
        results = run_on_ranks(world_size, fit, keeps_groups=True, layout=layout, options=options, **settings)
        for found, own_scale, own_steps in results:
            assert (own_scale, own_steps) == (scale, steps), layout
            for name, value in found.items():
                original = name if name in expected else name.replace("output", "tok_embeddings")
                torch.testing.assert_close(value, expected[original], rtol=1e-9, atol=1e-12, msg=f"{layout}: {name}")


@on_ranks(1)
def test_fabric_rejects_steps_in_the_backward(rank: int) -> None:
    set_torchrun_environment(rank, 1)
    strategy = FabricStrategy(plan={}, optimizer_in_backward=True)
    plugin = FabricMixedPrecision("16-mixed", "cpu", Overflowing())
    fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy, plugins=[plugin])
    fabric.launch()
    model = fabric.setup(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="optimizer_in_backward: precision '16-mixed' has a gradient scaler"):
        fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))


@on_ranks(2)
@pytest.mark.parametrize("cuts", [None, ["3"]], ids=["tensor", "stages"])
def test_fabric_leaves_out_steps_on_all_ranks(rank: int, world_size: int, cuts: Any) -> None:
    set_torchrun_environment(rank, world_size)
    options: dict[str, Any] = {"plan": {"1": "column", "3": "row"}, "layout": "tp2"}
    if cuts is not None:
        options = {"plan": {}, "layout": "pp2", "pipeline_cuts": cuts, "num_micro_batches": 2}
    strategy = FabricStrategy(**options)
    plugin = FabricMixedPrecision("16-mixed", "cpu", Overflowing())
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy, plugins=[plugin])
    fabric.launch()

    def made() -> nn.Module:
        torch.manual_seed(2)
        return nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()

    expected = made()
    model = fabric.setup(made())
    theirs = torch.optim.SGD(expected.parameters(), lr=0.1)
    # Torch's fused optimizers would leave out steps themselves.
    ours = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1, fused=True))
    assert strategy.precision.scaler is plugin.scaler
    for idx in range(4):
        x = torch.randint(11, (4, 5), generator=torch.Generator().manual_seed(idx))
        if cuts is None:
            fabric.backward(model(x).square().mean())
        else:
            strategy.pipeline_step(x, lambda m, each: m(each).square().mean())
        ours.step()
        ours.zero_grad()
        expected(x).square().mean().backward()
        if idx != 1:
            theirs.step()
        theirs.zero_grad()
        assert plugin.scaler.get_scale() == [1024.0, 512.0, 512.0, 1024.0][idx]
    wanted = dict(expected.named_parameters())
    for name, parameter in model.module.named_parameters():
        torch.testing.assert_close(
            full(parameter), wanted[name], rtol=1e-6, atol=1e-8
        )  # Lightning converts outputs to float32


@on_ranks(2)
def test_sparse_gradients_are_unscaled(rank: int) -> None:
    """An overflow in the values of rank 1's sparse gradient makes both ranks leave out the step."""
    torch.manual_seed(0)
    model = nn.Embedding(7, 3, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    gradient_scaler = GradScaler("cpu", init_scale=1024.0)
    agree_on_overflow(gradient_scaler, optimizer)
    for step in range(2):
        before = model.weight.detach().clone()
        gradient_scaler.scale(model(torch.tensor([1, 4, 1])).sum()).backward()
        if step == 1 and rank == 1:
            model.weight.grad._values()[0] = torch.inf
        gradient_scaler.step(optimizer)
        gradient_scaler.update()
        optimizer.zero_grad()
        change = torch.zeros(7, 3).index_add(0, torch.tensor([1, 4, 1]), -torch.ones(3, 3))
        torch.testing.assert_close(model.weight.detach() - before, change if step == 0 else torch.zeros(7, 3))
