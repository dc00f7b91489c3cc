"""The classes of every installed namespace, the registered names, and settings that raise in the constructor."""

from __future__ import annotations

import importlib
import inspect
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.fabric
import lightning.pytorch
import lightning_fabric
import pytest
import pytorch_lightning

from weft._plugin import factory

PUBLIC = {
    "weft.lightning": (lightning.pytorch.strategies, "StrategyRegistry"),
    "weft.lightning.fabric": (lightning.fabric.strategies, "STRATEGY_REGISTRY"),
    "weft.pytorch_lightning": (pytorch_lightning.strategies, "StrategyRegistry"),
    "weft.lightning_fabric": (lightning_fabric.strategies, "STRATEGY_REGISTRY"),
}
# name -> (data_parallel_size, tensor_parallel_size)
PRESETS = {"weft": ("auto", "auto"), "weft_tp": (1, "auto"), "weft_fsdp": ("auto", 1), "weft_2d": ("auto", 2)}
TRAINER_MODULES = ("weft.lightning", "weft.pytorch_lightning")


@pytest.mark.parametrize("name", PUBLIC)
def test_each_namespace_has_its_class_and_presets(name: str) -> None:
    strategies, registry_name = PUBLIC[name]
    cls = importlib.import_module(name).WeftModelParallelStrategy
    assert issubclass(cls, strategies.ModelParallelStrategy)
    assert (cls.__module__, cls.__qualname__) == (name, "WeftModelParallelStrategy")
    registry = getattr(strategies, registry_name)
    for registered, (data, tensor) in PRESETS.items():
        strategy = registry.get(registered)
        assert type(strategy) is cls
        assert strategy.plan.is_auto
        assert (strategy._data_parallel_size, strategy._tensor_parallel_size) == (data, tensor)


@pytest.mark.parametrize("name", PUBLIC)
def test_signature_extends_signature_of_lightning(name: str) -> None:
    strategies, _ = PUBLIC[name]
    cls = importlib.import_module(name).WeftModelParallelStrategy
    ours = inspect.signature(cls).parameters
    for argument, stock in inspect.signature(strategies.ModelParallelStrategy).parameters.items():
        if argument == "parallelize_fn":
            assert ours[argument].default is None
        else:
            assert ours[argument].default == stock.default, argument
    pipeline_arguments = ["pipeline_cuts", "pipeline_parallel_size", "pipeline_schedule", "num_micro_batches"]
    pipeline_arguments += ["micro_batch_shares"]
    if name in TRAINER_MODULES:
        pipeline_arguments = [
            "pipeline_cuts",
            "pipeline_module",
            *pipeline_arguments[1:],
            "split_batch",
            "micro_batch_weight",
        ]
    last_arguments = ["resume"] if name in TRAINER_MODULES else []
    assert list(ours)[-26 - len(pipeline_arguments) - len(last_arguments) :] == [
        "plan",
        "check_batches",
        "check_batches_every",
        "fused_optimizers",
        "optimizer_state",
        "master_weights",
        "offload",
        "empty_init",
        "optimizer_in_backward",
        "activation_checkpointing",
        "activation_offload",
        "compile",
        "data_replicate_size",
        "zero_stage",
        "layout",
        "memory_limit",
        "sequence_parallel",
        "context_parallel_size",
        "context_attention",
        "expert_parallel_size",
        *pipeline_arguments,
        "verify",
        "join_gate_up",
        "pretrained",
        "allow_pickle",
        "async_save",
        "affinity",
        *last_arguments,
    ]


def test_registration_is_idempotent() -> None:
    before = dict(lightning.pytorch.strategies.StrategyRegistry)
    factory.register_installed()
    assert dict(lightning.pytorch.strategies.StrategyRegistry) == before


@pytest.mark.parametrize(
    ("registry", "entry_class"),
    [
        (lightning.pytorch.strategies.StrategyRegistry, lightning.pytorch.Trainer),
        (lightning.fabric.strategies.STRATEGY_REGISTRY, lightning.fabric.Fabric),
    ],
)
def test_error_without_import_is_documented(
    registry: dict, entry_class: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning reads no entry point before it raises, so an entry point cannot replace the import."""
    groups: list[str] = []
    monkeypatch.setattr("lightning.fabric.utilities.registry.entry_points", lambda group: groups.append(group) or [])
    monkeypatch.delitem(registry, "weft")
    with pytest.raises(ValueError) as raised:
        entry_class(accelerator="cpu", devices=2, strategy="weft")
    assert groups == []
    first_sentence = str(raised.value).partition("`.")[0] + "`"
    root = Path(__file__).parents[2]
    for name in ("README.md", "docs/usage.md"):
        assert f"ValueError: {first_sentence}" in " ".join((root / name).read_text().split()), name
    entry_class(accelerator="cpu", devices=1)
    assert groups, "Lightning reads the entry points of callbacks"


def test_registration_of_another_package_is_not_replaced() -> None:
    registry = lightning.pytorch.strategies.StrategyRegistry
    ours = registry.pop("weft")
    try:
        registry.register("weft", lightning.pytorch.strategies.DDPStrategy)
        with pytest.raises(ValueError, match=r"'weft' is registered in lightning\.pytorch\.strategies already"):
            factory.register_installed()
    finally:
        registry["weft"] = ours


def test_absent_namespace_raises() -> None:
    absent = factory.Flavour("not_there", "not_there.x", "R", "not_there", object, "weft.not_there")
    with pytest.raises(ImportError, match="run `pip install not-there`"):
        factory.strategy_class(absent)


@pytest.mark.parametrize("name", PUBLIC)
@pytest.mark.parametrize(
    ("settings", "error", "remedy"),
    [
        ({"data_replicate_size": 0}, ValueError, "data_replicate_size is 0; pass a number of ranks from 1 on"),
        ({"tensor_parallel_size": "all"}, ValueError, "tensor_parallel_size is 'all'"),
        ({"zero_stage": 4}, ValueError, "zero_stage=4; pass 0"),
        ({"zero_stage": True}, ValueError, "zero_stage=True"),
        ({"zero_stage": 1, "optimizer_in_backward": True}, ValueError, "pass one of the two"),
        ({"sequence_parallel": 1}, ValueError, "sequence_parallel=1"),
        ({"sequence_parallel": True}, ValueError, "sequence_parallel=True without a plan"),
        ({"layout": "dp2,dp2"}, ValueError, "'dp2,dp2' has the part 'dp2'"),
        ({"layout": "dp2,xp3"}, ValueError, "has the part 'xp3'"),
        (
            {"layout": "dp2", "tensor_parallel_size": 2, "data_replicate_size": "auto"},
            ValueError,
            "got layout='dp2', which gives the sizes of all axes, and also data_replicate_size='auto' and "
            "tensor_parallel_size=2; leave these out, or write them into the layout\\.$",
        ),
        ({"plan": {"a": "diagonal"}}, ValueError, "diagonal"),
        ({"plan": 3}, TypeError, "got a int"),
        ({"affinity": True}, ValueError, "affinity=True; pass 'auto', or None"),
        ({"check_batches": -1}, ValueError, "check_batches=-1"),
        ({"check_batches_every": 0.5}, ValueError, "check_batches_every=0.5"),
        ({"fused_optimizers": "yes"}, ValueError, "fused_optimizers='yes'"),
        ({"empty_init": None}, ValueError, "empty_init=None"),
        ({"optimizer_in_backward": 1}, ValueError, "optimizer_in_backward=1; pass True, False or 'rows'"),
        ({"optimizer_in_backward": "rows"}, ValueError, "optimizer_in_backward='rows' without a plan"),
        ({"plan": "auto", "zero_stage": 1, "optimizer_in_backward": "rows"}, ValueError, "'rows' and zero_stage=1"),
        ({"activation_checkpointing": True}, TypeError, "got True for what to checkpoint; pass 'none'"),
        ({"activation_checkpointing": [1]}, TypeError, "for what to checkpoint"),
        ({"activation_checkpointing": []}, TypeError, "for what to checkpoint"),
        ({"activation_offload": 0}, ValueError, "activation_offload=0"),
        ({"activation_offload": True}, ValueError, "activation_offload=True without activation checkpointing"),
    ],
)
def test_invalid_settings_raise(name: str, settings: dict, error: type[Exception], remedy: str) -> None:
    with pytest.raises(error, match=remedy):
        importlib.import_module(name).WeftModelParallelStrategy(**settings)


@pytest.mark.parametrize("name", PUBLIC)
def test_unknown_arguments_raise(name: str) -> None:
    cls = importlib.import_module(name).WeftModelParallelStrategy
    with pytest.raises(TypeError) as raised:
        cls(tensor_paralel_size=2)
    expected = "got the unknown argument 'tensor_paralel_size' (did you mean 'tensor_parallel_size'?)."
    assert str(raised.value) == f"WeftModelParallelStrategy {expected}"
    with pytest.raises(
        TypeError, match=r"arguments 'qqq', 'lay_out' \(did .* 'layout'\?\); the known arguments are .*plan"
    ):
        cls(qqq=1, lay_out="dp2")
    with pytest.raises(TypeError, match=r"^WeftModelParallelStrategy: too many positional arguments; pass .*by name: "):
        cls(*[None] * 60)
    # LightningCLI and type checkers read the signature.
    hints = typing.get_type_hints(cls.__init__)
    assert hints["tensor_parallel_size"] == int | str and hints["return"] is type(None)
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in inspect.signature(cls).parameters.values())


def test_unknown_arguments_of_callbacks_raise() -> None:
    from weft.lightning import MemoryMonitor

    with pytest.raises(TypeError, match=r"^MemoryMonitor got the unknown argument 'every_steps' .*'every_n_steps'"):
        MemoryMonitor(every_steps=3)


def test_parallelize_fn_must_be_callable() -> None:
    from weft.lightning.fabric import WeftModelParallelStrategy

    with pytest.raises(TypeError, match="plan=\\.\\.\\."):
        WeftModelParallelStrategy("auto")


@pytest.mark.parametrize("name", TRAINER_MODULES)
def test_invalid_sizes_raise_before_launch(name: str) -> None:
    cls = importlib.import_module(name).WeftModelParallelStrategy
    trainer_class = {"weft.lightning": lightning.pytorch.Trainer}.get(name, pytorch_lightning.Trainer)
    with pytest.raises(
        RuntimeError, match=r"has 1 process .*devices='auto' means 1\): .*tensor_parallel=2' has 2 ranks"
    ):
        trainer_class(accelerator="cpu", strategy=cls(plan="auto", tensor_parallel_size=2), logger=False)
    valid_meshes = "'data_parallel=1,tensor_parallel=4', 'data_parallel=2,tensor_parallel=2'"
    with pytest.raises(RuntimeError, match=f"has 4 processes .* whose product is 4, such as {valid_meshes}"):
        trainer_class(accelerator="cpu", devices=4, strategy=cls(plan={}, tensor_parallel_size=3), logger=False)
    with pytest.raises(RuntimeError, match="layout 'rep2,dp2,tp2' has 8 ranks"):
        trainer_class(accelerator="cpu", devices=4, strategy=cls(layout="rep2,dp2,tp2"), logger=False)
