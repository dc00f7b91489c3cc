"""Training over the data axes at each ZeRO stage; test_meshes compares more layouts with one device.

Fabric, gradient accumulation, clipping, manual optimization, optimizer_in_backward, precision, saving, and errors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.fabric import Fabric
from lightning_plugin.scripts.plugin_models import (
    DIM,
    FeedForward,
    Model,
    assert_same_weights,
    fixed_data,
    loader,
    set_torchrun_environment,
    trainer,
    weights,
)
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from support.models import Llama, LlamaArgs, token_batches
from support.ranks import on_ranks, run_on_ranks
from weft.lightning import WeftModelParallelStrategy
from weft.lightning.fabric import WeftModelParallelStrategy as FabricStrategy
from weft.strategy.data_parallel import GradientReducer

LAYOUTS_AND_ZERO_STAGES = [
    ("dp2", 0),
    ("dp2", 1),
    ("dp2", 2),
    ("dp2", 3),
    ("dp2,tp2", 0),
    ("dp2,tp2", 1),
    ("dp2,tp2", 3),
]
TP_SIZE = {"dp2": 1, "dp2,tp2": 2, "tp1": 1}


def local_batch(batch: Tensor, data_rank: int, num_data_ranks: int) -> Tensor:
    return batch.chunk(num_data_ranks)[data_rank]


def _fabric_steps(rank: int, world_size: int, folder: str, layout: str, zero_stage: int | None) -> dict[str, Any]:
    """Train four clipped steps of two micro-batches, save after two, load at the end; return the results."""
    set_torchrun_environment(rank, world_size)
    strategy = FabricStrategy(
        plan="auto", layout=layout, zero_stage=zero_stage, save_distributed_checkpoint=zero_stage != 0
    )
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy)
    fabric.launch()
    torch.manual_seed(0)
    args = LlamaArgs(dtype=torch.float64)
    model = Llama(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = fabric.setup(model, optimizer)
    data_rank, num_data_ranks = strategy.data_axes.rank, strategy.data_axes.size
    losses, norms, state = [], [], {"model": model, "optimizer": optimizer}
    path = Path(folder, f"{layout}-{zero_stage}")
    batches = token_batches(8, args.vocab_size)
    for step in range(4):
        for micro in range(2):
            inputs, targets = (local_batch(each, data_rank, num_data_ranks) for each in batches[2 * step + micro])
            with fabric.no_backward_sync(model, enabled=micro == 0):
                loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()) / 2
                fabric.backward(loss)
            losses.append(fabric.all_reduce(loss.detach(), reduce_op="mean").item())
        norms.append(fabric.clip_gradients(model, optimizer, max_norm=0.1).item())
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            fabric.save(path, state)
    result = {"losses": losses, "norms": norms, "weights": weights(model)}
    fabric.load(path, state)
    inputs, targets = (local_batch(each, data_rank, num_data_ranks) for each in batches[4])
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()) / 2
    result["loss_after_load"] = fabric.all_reduce(loss.detach(), reduce_op="mean").item()
    return result


def test_fabric_matches_one_device(tmp_path: Path) -> None:
    case: dict[str, Any] = {"folder": str(tmp_path)}
    [expected] = run_on_ranks(1, _fabric_steps, layout="tp1", zero_stage=None, **case)
    assert expected["loss_after_load"] == expected["losses"][4]
    for layout, zero_stage in LAYOUTS_AND_ZERO_STAGES:
        world_size = 2 * TP_SIZE[layout]
        for result in run_on_ranks(world_size, _fabric_steps, layout=layout, zero_stage=zero_stage, **case):
            for name in ("losses", "norms", "loss_after_load"):
                mine, theirs = (torch.tensor(r[name], dtype=torch.float64) for r in (result, expected))
                torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=0, msg=lambda m, n=name: f"{n}: {m}")
            assert_same_weights(result["weights"], expected["weights"])


class CountsReductions(Model):
    """Counts the reductions in each training batch."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.reductions: list[int] = []
        self.num_reductions = 0

    def on_train_batch_start(self, *_: Any) -> None:
        self.num_reductions = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.reductions.append(self.num_reductions)


def _count_reductions(module: CountsReductions, monkeypatch: pytest.MonkeyPatch) -> None:
    # FSDP2 calls reduce_scatter_tensor up to torch 2.11, and reduce_scatter_single since.
    for name in ("all_reduce", "reduce_scatter_tensor", "reduce_scatter_single"):
        real = getattr(dist, name, None)
        if real is None:
            continue

        def counted(*args: Any, real: Any = real, **kwargs: Any) -> Any:
            module.num_reductions += 1
            return real(*args, **kwargs)

        monkeypatch.setattr(dist, name, counted)


@on_ranks(2)
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_accumulation_reduces_once_per_step(rank: int, world_size: int, tmp_path: Path, zero_stage: int) -> None:
    """Only the last micro-batch of a step reduces gradients.

    The stock strategy reduces after each one: its `block_backward_sync` supports DistributedDataParallel only.
    """
    set_torchrun_environment(rank, world_size)
    strategy = WeftModelParallelStrategy(plan={}, layout="dp2", zero_stage=zero_stage, check_batches=0)
    model = CountsReductions(optimizer="sgd")
    run = trainer(world_size, strategy, tmp_path, accumulate_grad_batches=3)
    hook_calls: list[Tensor] = []
    on_gradient = GradientReducer._on_gradient
    with pytest.MonkeyPatch.context() as monkeypatch:
        _count_reductions(model, monkeypatch)
        monkeypatch.setattr(GradientReducer, "_on_gradient", lambda r, p: (hook_calls.append(p), on_gradient(r, p))[1])
        run.fit(model, loader())
    assert run.global_step == 2
    num_expected = 6 * len(list(model.parameters())) if zero_stage < 2 else 0
    assert len(hook_calls) == num_expected, "GradientReducer must see each gradient of each micro-batch once"
    reductions_of_step = model.reductions[2]
    assert model.reductions == [0, 0, reductions_of_step] * 2
    assert 1 <= reductions_of_step <= 4


class ScaleBetween(Model):
    """Has a parameter between a column and a row layer; each rank's gradient of the parameter is a partial sum."""

    def __init__(self) -> None:
        super().__init__(optimizer="sgd")
        self.feed_forward.between = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.feed_forward.forward = self._scaled

    def _scaled(self, x: Tensor) -> Tensor:
        mlp = self.feed_forward
        return mlp.w2(mlp.w1(x) * mlp.between)


class CallsInnerLayers(Model):
    """Its forward calls layers of `feed_forward`, which FSDP gathers only for `feed_forward`'s own forward."""

    def forward(self, x: Tensor) -> Tensor:
        return self.feed_forward.w2(self.feed_forward.w1(self.norm(x)))


COLUMN_ROW_PLAN = {"feed_forward.w1": "column", "feed_forward.w2": "row", "feed_forward.w3": "replicate"}


@on_ranks(4)
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_partial_gradients_raise_during_accumulation(
    rank: int, world_size: int, tmp_path: Path, zero_stage: int
) -> None:
    set_torchrun_environment(rank, world_size)
    strategy = WeftModelParallelStrategy(plan=COLUMN_ROW_PLAN, layout="dp2,tp2", zero_stage=zero_stage)
    run = trainer(world_size, strategy, tmp_path, accumulate_grad_batches=2)
    with pytest.raises(ValueError, match=r"replicated parameters '\S*between' differ"):
        run.fit(ScaleBetween(), loader())


@on_ranks(4)
def test_calling_inner_layers_of_sharded_module_raises(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    strategy = WeftModelParallelStrategy(plan=COLUMN_ROW_PLAN, layout="dp2,tp2")
    with pytest.raises(ValueError, match="a Linear was called while its weight is sharded over data_parallel and"):
        trainer(world_size, strategy, tmp_path).fit(CallsInnerLayers(), loader())
    model = CallsInnerLayers()
    model.norm = nn.Identity()  # a single remaining module is gathered when the step begins
    strategy = WeftModelParallelStrategy(plan=COLUMN_ROW_PLAN, layout="dp2,tp2")
    trainer(world_size, strategy, tmp_path).fit(model, loader())
    assert len(model.losses) == 6


class Gan(L.LightningModule):
    """Manual optimization as in a GAN: two modules and optimizers, a step of each in every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(1)
        self.generator = nn.Sequential(nn.Linear(DIM, DIM, dtype=torch.float64), FeedForward())
        self.discriminator = FeedForward()

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for optimizer, sign in zip(self.optimizers(), (1, -1), strict=True):
            self.toggle_optimizer(optimizer)
            loss = sign * self.discriminator(self.generator(batch)).tanh().mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.SGD(self.generator.parameters(), lr=0.5, momentum=0.9),
            torch.optim.AdamW(self.discriminator.parameters(), lr=1e-2),
        ]


def _train_gan(rank: int, world_size: int, folder: str, layout: str, zero_stage: int | None) -> dict[str, Tensor]:
    set_torchrun_environment(rank, world_size)
    strategy = WeftModelParallelStrategy(plan="auto", layout=layout, zero_stage=zero_stage)
    model = Gan()
    tp_size = TP_SIZE[layout]
    data = [local_batch(batch, rank // tp_size, world_size // tp_size) for batch in fixed_data().split(4)]
    trainer(world_size, strategy, folder).fit(model, torch.utils.data.DataLoader(data, batch_size=None))
    return weights(model)


def test_manual_optimization_with_two_optimizers_matches_one_device(tmp_path: Path) -> None:
    [expected] = run_on_ranks(1, _train_gan, folder=str(tmp_path), layout="tp1", zero_stage=None)
    for layout, zero_stage in LAYOUTS_AND_ZERO_STAGES:
        case: dict[str, Any] = {"folder": str(tmp_path), "layout": layout, "zero_stage": zero_stage}
        for result in run_on_ranks(2 * TP_SIZE[layout], _train_gan, **case):
            assert_same_weights(result, expected, rtol=1e-9)


class OwnParameter(Gan):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(DIM))


@on_ranks(2)
def test_manual_optimization_with_parameters_outside_modules_raises(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    with pytest.raises(ValueError, match=r"OwnParameter cannot gather parameters .* 'scale'; put them into one"):
        trainer(world_size, "weft_fsdp", tmp_path).fit(OwnParameter(), loader())


def _train_in_backward(
    rank: int, world_size: int, folder: str, layout: str, zero_stage: int | None, in_backward: bool
) -> dict[str, Tensor]:
    set_torchrun_environment(rank, world_size)
    strategy = WeftModelParallelStrategy(
        plan="auto", layout=layout, zero_stage=zero_stage, optimizer_in_backward=in_backward
    )
    model, tp_size = Model(), TP_SIZE[layout]
    data = [local_batch(batch, rank // tp_size, world_size // tp_size) for batch in fixed_data().split(4)]
    run = trainer(world_size, strategy, folder, gradient_clip_val=0.01, gradient_clip_algorithm="value")
    run.fit(model, torch.utils.data.DataLoader(data, batch_size=None))
    return weights(model)


def test_optimizer_in_backward_matches_one_device(tmp_path: Path) -> None:
    [expected] = run_on_ranks(
        1, _train_in_backward, folder=str(tmp_path), layout="tp1", zero_stage=None, in_backward=False
    )
    for layout, zero_stage in LAYOUTS_AND_ZERO_STAGES:
        if zero_stage != 1:  # stage 1 steps flat shards after the backward, which excludes optimizer_in_backward
            case: dict[str, Any] = {
                "folder": str(tmp_path),
                "layout": layout,
                "zero_stage": zero_stage,
                "in_backward": True,
            }
            for result in run_on_ranks(2 * TP_SIZE[layout], _train_in_backward, **case):
                assert_same_weights(result, expected, rtol=1e-9)


class ModelOfAnyDtype(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))
        self.weight_dtypes: list[torch.dtype] = []

    def configure_model(self) -> None:
        self.model[0].register_forward_hook(lambda m, _, out: self.weight_dtypes.append(m.weight.dtype))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return F.mse_loss(self.model(batch.to(next(self.model.parameters()).dtype)).float(), batch.float())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@on_ranks(2)
@pytest.mark.parametrize(
    ("precision", "stored", "gathered"),
    [
        ("32-true", torch.float32, torch.float32),
        ("bf16-mixed", torch.float32, torch.bfloat16),
        ("bf16-true", torch.bfloat16, torch.bfloat16),
    ],
)
def test_stored_and_gathered_dtypes(
    rank: int, world_size: int, tmp_path: Path, precision: str, stored: torch.dtype, gathered: torch.dtype
) -> None:
    """FSDP2 stores, gathers and reduces in the dtypes of Lightning's `precision`.

    The stock strategy leaves FSDP2's MixedPrecisionPolicy to the user.
    """
    set_torchrun_environment(rank, world_size)
    model = ModelOfAnyDtype()
    strategy = WeftModelParallelStrategy(plan={}, layout="dp2")
    run = trainer(world_size, strategy, tmp_path, precision=precision)
    run.fit(model, loader(fixed_data().float()))
    assert isinstance(model, FSDPModule)
    assert all(isinstance(p, DTensor) and p.dtype == stored for p in model.parameters())
    assert model.weight_dtypes
    assert set(model.weight_dtypes) == {gathered}
    reduced = {state._mp_policy.reduce_dtype for state in model._get_fsdp_state()._state_ctx.all_states}
    assert reduced == ({torch.float32} if precision.startswith("bf16") else {None})


@on_ranks(4)
@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_clipping_by_value_bounds_gradients(rank: int, world_size: int, tmp_path: Path, zero_stage: int) -> None:
    set_torchrun_environment(rank, world_size)
    bound = 1e-3

    class Clipped(Model):
        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            super().optimizer_step(*args, **kwargs)
            local_grads = [getattr(p.grad, "_local_tensor", p.grad) for p in self.parameters()]
            assert all(grad.abs().max() <= bound for grad in local_grads if grad.numel())
            assert any((grad.abs() == bound).any() for grad in local_grads)

    strategy = WeftModelParallelStrategy(plan="auto", layout="dp2,tp2", zero_stage=zero_stage)
    options = {"gradient_clip_val": bound, "gradient_clip_algorithm": "value"}
    trainer(world_size, strategy, tmp_path, **options).fit(Clipped(), loader())


def _train_and_save(rank: int, world_size: int, folder: str, case: dict[str, Any]) -> dict[str, Any]:
    """Train three steps and, with case["save"], save before and after the first; return losses, steps and weights."""
    set_torchrun_environment(rank, world_size)
    steps: list[int] = []

    class Saving(Model):
        def on_train_start(self) -> None:
            self.optimizers().optimizer.register_step_post_hook(lambda *_: steps.append(self.global_step))
            self._save()

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 0:
                self._save()

        def _save(self) -> None:
            had_no_grad = [p.grad is None for p in self.parameters()]
            num_states = len(self.optimizers().optimizer.state)
            if case["save"]:
                self.trainer.save_checkpoint(f"{folder}/{self.global_step}.ckpt")
            assert [p.grad is None for p in self.parameters()] == had_no_grad
            assert len(self.optimizers().optimizer.state) == num_states

    strategy = WeftModelParallelStrategy(
        plan="auto", layout=case["layout"], zero_stage=case["zero_stage"], save_distributed_checkpoint=case["sharded"]
    )
    model = Saving(optimizer=case["optimizer"])
    trainer(world_size, strategy, folder, max_steps=3).fit(model, loader())
    return {"losses": model.losses, "steps": steps, "weights": weights(model)}


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize(("layout", "zero_stage"), [("dp2", 1), ("dp2", 3), ("dp2,tp2", 0)])
@pytest.mark.parametrize("sharded", [True, False], ids=["directory", "file"])
def test_saving_does_not_change_training(
    tmp_path: Path, optimizer: str, layout: str, zero_stage: int, sharded: bool
) -> None:
    """Runs that save before the first step and after it have the losses, steps and weights of runs that do not.

    torch's `get_optimizer_state_dict`, which the stock strategy uses, steps an optimizer that has no state yet.
    """
    case = {"layout": layout, "zero_stage": zero_stage, "optimizer": optimizer, "sharded": sharded}
    world_size = 2 * TP_SIZE[layout]
    runs = [
        run_on_ranks(world_size, _train_and_save, folder=str(tmp_path), case={**case, "save": save})
        for save in (False, True)
    ]
    for plain, saved in zip(*runs, strict=True):
        assert plain["losses"] == saved["losses"]
        assert plain["steps"] == saved["steps"]
        assert len(saved["steps"]) == 3
        assert_same_weights(plain["weights"], saved["weights"], rtol=0)
    assert (tmp_path / "0.ckpt").exists()
    assert (tmp_path / "1.ckpt").exists()
