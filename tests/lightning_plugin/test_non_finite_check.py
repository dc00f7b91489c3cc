"""NonFiniteCheck: NaN in one rank's input, loss or gradient ends the run on all ranks before the weights change."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from lightning_plugin.scripts.pipeline_models import Text, pipeline_strategy, text_loader
from lightning_plugin.scripts.plugin_models import (
    DIM,
    NUM_BATCHES,
    Model,
    assert_same_weights,
    fixed_data,
    loader,
    set_torchrun_environment,
    trainer,
    weights,
)
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils._python_dispatch import TorchDispatchMode
from torchmetrics import MeanMetric

from support.ranks import on_ranks, run_on_ranks
from weft._plugin.non_finite_check import _watched_modules
from weft.lightning import NonFiniteCheck, WeftModelParallelStrategy
from weft.strategy.data_parallel.local import local_shard
from weft.strategy.faults import ModuleWatch, non_finite

NAN = float("nan")
STEP = 3  # the third batch has the fault
ADVICE = "; the weights are those before this step: check the batch, the learning rate and the device, and resume from"


class _Poison(torch.autograd.Function):
    """Makes gradients NaN; the forward is the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * NAN


class Faulty(Model):
    """One rank has a fault in step STEP.

    fault: NaN in the "input", in the output of a "module", or in a "gradient" that is averaged already; an infinite
        "loss"; NaN made by the "backward" of a function.
    """

    def __init__(self, fault: str = "", rank: int = 0) -> None:
        super().__init__()
        self.fault, self.rank = fault, rank

    def _has(self, fault: str) -> bool:
        return self.fault == fault and dist.get_rank() == self.rank and self.trainer.global_step == STEP - 1

    def on_fit_start(self) -> None:
        self.norm.register_forward_hook(self._after_norm)

    def _after_norm(self, module: nn.Module, args: Any, output: Tensor) -> Any:
        if self._has("module"):
            return output * NAN
        return _Poison.apply(output) if self._has("backward") else None

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self._has("input"):
            batch = batch.clone()
            batch[1, 2] = NAN
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if self._has("loss") else loss


class PoisonGradient(Callback):
    """Makes an averaged gradient NaN on the rank of the module's fault "gradient"; add it before the check."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if pl_module._has("gradient"):
            gradient = dict(pl_module.named_parameters())["feed_forward.w3.weight"].grad
            assert gradient is not None
            local_shard(gradient)[-1, -1] = NAN


class PoisonScaledGradient(PoisonGradient):
    """Makes the gradient NaN before a scaler looks at it."""

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        super().on_before_optimizer_step(trainer, pl_module, None)


def _fit(
    rank: int, world_size: int, folder: str, layout: str, zero: int, fault: tuple[str, int], **check: Any
) -> tuple[str, dict[str, Tensor]]:
    """Return the text of the error, or "", and the weights; without a fault, train STEP - 1 steps."""
    set_torchrun_environment(rank, world_size)
    strategy = WeftModelParallelStrategy(plan="auto", layout=layout, zero_stage=zero, check_batches=0)
    steps = {} if fault[0] else {"max_steps": STEP - 1}
    run = trainer(world_size, strategy, folder, callbacks=[PoisonGradient(), NonFiniteCheck(**check)], **steps)
    model = Faulty(*fault)
    text = ""
    try:
        run.fit(model, loader(fixed_data() + rank // (2 if "tp2" in layout else 1)))
    except RuntimeError as error:
        text = str(error)
    assert run.global_step == STEP - 1
    return text, weights(model)


ALL = "the gradient of 'scale' and of 5 more of 6 parameters is not finite on ranks 0 and 1"
FAULTS: dict[str, tuple[str, int, tuple[str, int], bool, str]] = {  # layout, zero, fault, find_module, text
    "input": ("dp2", 0, ("input", 1), False, f"the loss is nan on rank 1; {ALL}"),
    "loss": ("dp2", 3, ("loss", 0), False, f"the loss is inf on rank 0; {ALL}"),
    "gradient of a shard": (
        "tp2",
        0,
        ("gradient", 1),
        False,
        "the gradient of 'feed_forward.w3.weight' is not finite on rank 1",
    ),
    "gradient of a replica": (
        "dp2",
        0,
        ("gradient", 0),
        True,
        "the gradient of 'feed_forward.w3.weight' is not finite on rank 0",
    ),
    "backward": (
        "dp2",
        1,
        ("backward", 1),
        False,
        "the gradient of 'norm.weight' and of 1 more of 6 parameters is not finite on ranks 0 and 1 "
        "(after averaging over data-parallel ranks: pass find_module=True to find the rank)",
    ),
    "backward, find": (
        "dp2",
        1,
        ("backward", 1),
        True,
        "the gradient of 'norm.weight' and of 1 more of 6 parameters is not finite on ranks 0 and 1; the gradient of "
        "'norm.weight' was the first on rank 1",
    ),
    "fully sharded, find": (
        "dp2",
        3,
        ("backward", 0),
        True,
        "the gradient of 'norm.weight' and of 1 more of 6 parameters is not finite on ranks 0 and 1; the gradient of "
        "'norm.weight' was the first on rank 0",
    ),
    "module, find": (
        "tp2",
        0,
        ("module", 1),
        True,
        f"the loss is nan on ranks 0 and 1; {ALL}; the output of 'norm' (LayerNorm) was the first on rank 1",
    ),
    "module, find, four ranks": (
        "dp2,tp2",
        3,
        ("module", 3),
        True,
        f"the loss is nan on ranks 2 and 3; {ALL.replace('0 and 1', '0, 1, 2 and 3')}; the output of 'norm' "
        "(LayerNorm) was the first on rank 3",
    ),
    "input, find": (
        "dp2",
        3,
        ("input", 1),
        True,
        f"the loss is nan on rank 1; {ALL}; the input of the Faulty was the first on rank 1",
    ),
}


@functools.cache
def _healthy(world_size: int, folder: str, layout: str, zero: int, find_module: bool) -> list[tuple[str, Any]]:
    return run_on_ranks(
        world_size, _fit, folder=folder, layout=layout, zero=zero, fault=("", 0), find_module=find_module
    )


@pytest.mark.parametrize("name", FAULTS)
def test_fault_ends_the_run_before_the_step(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    layout, zero, fault, find_module, expected = FAULTS[name]
    case = {"folder": str(tmp_path_factory.getbasetemp()), "layout": layout, "zero": zero, "find_module": find_module}
    world_size = 4 if "," in layout else 2
    healthy = _healthy(world_size, **case)
    faulty = run_on_ranks(world_size, _fit, fault=fault, **case)
    assert [text for text, _ in healthy] == [""] * world_size
    texts = {text.replace("'norm.bias' was", "'norm.weight' was") for text, _ in faulty}  # either gradient may be first
    assert texts == {f"NonFiniteCheck: in step 3, {expected}{ADVICE} a checkpoint."}
    for (_, before), (_, after) in zip(healthy, faulty, strict=True):
        assert_same_weights(after, before, rtol=0)


class FaultyText(Text):
    """The output of a layer has NaN on rank 0 in the second step."""

    def on_fit_start(self) -> None:
        super().on_fit_start()
        self.model.layers[1].register_forward_hook(self._after)

    def _after(self, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        return output * NAN if self.trainer.global_step == 1 and dist.get_rank() == 0 else None


VOCAB_HEAD = {"model.tok_embeddings": "vocab_embedding", "model.output": "vocab_head"}


def _fit_stages(rank: int, world_size: int, folder: str, layout: str, find_module: bool) -> str:
    set_torchrun_environment(rank, world_size)
    callbacks = [NonFiniteCheck(find_module=find_module)]
    if layout == "tp2":
        strategy = WeftModelParallelStrategy(plan=VOCAB_HEAD, layout=layout, check_batches=0)
    else:
        strategy = pipeline_strategy(layout, check_batches=0)
    run = trainer(world_size, strategy, folder, callbacks=callbacks, accumulate_grad_batches=1)
    with pytest.raises(RuntimeError) as caught:
        run.fit(FaultyText(), text_loader(24, 8, rank % 2 if "dp2" in layout else 0, world_size // 2))
    assert run.global_step == 1
    return str(caught.value)


def test_fault_in_a_stage(tmp_path: Path) -> None:
    """Only the last stage computes a loss; the first stage has the module."""
    for find_module in (False, True):
        case = {"folder": str(tmp_path), "layout": "pp2", "find_module": find_module}
        [text] = set(run_on_ranks(2, _fit_stages, **case))
        assert text.startswith("NonFiniteCheck: in step 2, the loss is nan on rank 1; the gradient of 'model.")
        source = "; the output of 'model.layers.1' (LlamaBlock) was the first on rank 0" if find_module else ""
        assert f"parameters is not finite on rank 1{source}{ADVICE}" in text, text
    [text] = set(run_on_ranks(4, _fit_stages, folder=str(tmp_path), layout="pp2,dp2", find_module=True))
    assert "in step 2, the loss is nan on rank 2; " in text
    assert "; the output of 'model.layers.1' (LlamaBlock) was the first on rank 0; the weights" in text


@on_ranks(2)
def test_one_number_is_exchanged_for_each_check(rank: int, world_size: int, tmp_path: Path, monkeypatch: Any) -> None:
    set_torchrun_environment(rank, world_size)
    calls: list[int] = []
    all_reduce = dist.all_reduce

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(dist, name)

        def all_reduce(self, tensor: Tensor, *args: Any) -> Any:
            calls.append(run.global_step + 1)
            assert tensor.numel() == 1
            return all_reduce(tensor, *args)

    monkeypatch.setattr(non_finite, "dist", Counting())
    for every, steps in ((1, [1, 2, 3]), (2, [2, 4])):  # the end of training counts as step 4
        calls.clear()
        callbacks = [NonFiniteCheck(every, find_module=True)]
        run = trainer(world_size, "weft_fsdp", tmp_path, callbacks=callbacks, accumulate_grad_batches=2)
        run.fit(Model(), loader())
        assert calls == steps


@on_ranks(2)
def test_losses_between_checks_are_kept(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    run = trainer(world_size, "weft_fsdp", tmp_path, callbacks=[NonFiniteCheck(4)])
    expected = r"in step 4, the loss of step 3 is inf on rank 0; the gradient .*; the weights may have changed to such "
    with pytest.raises(RuntimeError, match=expected + "values since step 3: check"):
        run.fit(Faulty("loss", 0), loader())
    run = trainer(world_size, "weft_fsdp", tmp_path, callbacks=[NonFiniteCheck(10)], max_steps=STEP)
    expected = "in step 3, the loss is inf on rank 0; the weights may have changed to such values since step 3: check"
    with pytest.raises(RuntimeError, match=expected):
        run.fit(Faulty("loss", 0), loader())


@on_ranks(2)
def test_logits_of_vocab_head_are_not_read(rank: int, world_size: int, tmp_path: Path) -> None:
    text = _fit_stages(rank, world_size, str(tmp_path), "tp2", find_module=True)
    assert "; the output of 'model.layers.1' (LlamaBlock) was the first on rank 0; the weights are those" in text, text


class Manual(Faulty):
    """Steps its optimizer after the first of every `every` batches."""

    def __init__(self, fault: str, rank: int, every: int = 1) -> None:
        super().__init__(fault, rank)
        self.automatic_optimization, self.every = False, every

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        if batch_idx % self.every == 0:
            optimizer.step()


@on_ranks(2)
def test_manual_optimization(rank: int, world_size: int, tmp_path: Path) -> None:
    """With a check every 2 batches and an optimizer step in batches 1, 3 and 5, batches 3 and 5 are checked."""
    set_torchrun_environment(rank, world_size)
    bad_gradient = r", the gradient of 'feed_forward.w3.weight' .* on rank 1; "
    changed = "; the weights may have changed to such values since step 4: check"
    for check, every, fault, batches, expected in (
        (NonFiniteCheck(), 1, "gradient", 6, f"in step 3{bad_gradient}this optimizer has not stepped: check"),
        (NonFiniteCheck(2), 2, "gradient", 6, f"in step 5{bad_gradient}this optimizer has not stepped: check"),
        (NonFiniteCheck(2), 2, "loss", 6, f"in step 5, the loss of step 4 is inf on rank 1; .*{changed}"),
        (NonFiniteCheck(2), 2, "loss", 4, f"in step 4, the loss is inf on rank 1{changed}"),
    ):
        callbacks = [PoisonGradient(), check]
        run = trainer(world_size, "weft_tp", tmp_path, callbacks=callbacks, limit_train_batches=batches)
        with pytest.raises(RuntimeError, match=expected):
            run.fit(Manual(fault, 1, every), loader())


@on_ranks(1)
def test_gradient_scaler_skips_gradients(rank: int, tmp_path: Path) -> None:
    """A scaler leaves out steps with infinite gradients by itself; a loss that is infinite still ends the run."""
    set_torchrun_environment(rank, 1)
    for fault in ("gradient", "loss"):
        scaler = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=4.0))
        run = trainer(1, "weft", tmp_path, plugins=[scaler], callbacks=[PoisonScaledGradient(), NonFiniteCheck()])
        if fault == "gradient":
            model = Faulty(fault)
            run.fit(model, loader())
            assert len(model.losses) == NUM_BATCHES
            assert scaler.scaler is not None and scaler.scaler.get_scale() == 2, "one step is left out"
            assert all(bool(weight.isfinite().all()) for weight in weights(model).values())
        else:
            with pytest.raises(
                RuntimeError, match="in step 3, the loss is inf on rank 0; the weights are those before"
            ):
                run.fit(Faulty(fault), loader())


class Operators(TorchDispatchMode):
    """Records the names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func._schema.name)
        return func(*args, **(kwargs or {}))


class Fused(Model):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        assert not any(child._forward_hooks or child._forward_pre_hooks for child in self.feed_forward.children())
        assert self.feed_forward._forward_hooks and self.norm._forward_hooks
        with Operators() as operators:
            loss = super().training_step(batch, batch_idx)
        assert "weft::_column_row_mlp_saving" in operators.names, sorted(operators.names)
        return loss


@on_ranks(2)
def test_fused_modules_stay_fused(rank: int, world_size: int, tmp_path: Path) -> None:
    """A hook on a layer of a fused MLP makes the MLP run layer by layer."""
    set_torchrun_environment(rank, world_size)
    model = Fused()
    trainer(world_size, "weft_tp", tmp_path, callbacks=[NonFiniteCheck(find_module=True)]).fit(model, loader())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


class Parts(Model):
    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()
        self.blocks = nn.Sequential(
            nn.Linear(DIM, DIM), torch.compile(nn.Sequential(nn.Linear(DIM, DIM)), backend="eager")
        )
        self.feed_forward.compile(backend="eager")
        self.dropout = checkpoint_wrapper(self.dropout)


@on_ranks(1)
def test_metrics_and_compiled_modules_are_not_watched(rank: int) -> None:
    model = Parts()
    watched = _watched_modules(model)
    assert list(watched) == ["", "norm", "dropout", "blocks", "blocks.0"]
    assert type(watched["dropout"]) is nn.Dropout
    model.compile(backend="eager")
    assert _watched_modules(model) == {}


@on_ranks(1)
def test_hooks_do_nothing_in_compiled_code(rank: int) -> None:
    net = nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU())
    watch = ModuleWatch(dict(net.named_modules()), dict(net.named_parameters()))
    watch.is_active = True

    @torch.compile(backend="eager", fullgraph=True)
    def compiled(x: Tensor) -> Tensor:
        return net(x) + 1

    x = torch.full((2, DIM), NAN)
    compiled(x)
    assert watch.first() is None
    net(x)
    source = watch.first()
    assert source is not None and source.text == "the input of the Sequential"


@on_ranks(1)
def test_wrong_use_raises(rank: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="NonFiniteCheck got every_n_steps=0; pass a number of steps from 1 on"):
        NonFiniteCheck(every_n_steps=0)
    set_torchrun_environment(rank, 1)
    run = trainer(1, DDPStrategy(process_group_backend="gloo"), tmp_path, callbacks=[NonFiniteCheck()])
    with pytest.raises(TypeError, match="NonFiniteCheck got a Trainer with a DDPStrategy; pass strategy='weft'"):
        run.fit(Model(), loader())
    strategy = WeftModelParallelStrategy(plan="auto", optimizer_in_backward=True)
    run = trainer(1, strategy, tmp_path, callbacks=[NonFiniteCheck()])
    with pytest.raises(ValueError, match="the callback NonFiniteCheck overrides on_before_optimizer_step, but each"):
        run.fit(Model(), loader())
