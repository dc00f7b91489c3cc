"""The classes of every installed namespace, the registered names, and settings refused at once."""

from __future__ import annotations

import importlib
import inspect

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
TRAINER_MODULES = ("weft.lightning", "weft.pytorch_lightning")


@pytest.mark.parametrize("name", PUBLIC)
def test_class_of_each_namespace(name: str) -> None:
    strategies, registry_name = PUBLIC[name]
    cls = importlib.import_module(name).WeftModelParallelStrategy
    assert issubclass(cls, strategies.ModelParallelStrategy)
    assert (cls.__module__, cls.__qualname__) == (name, "WeftModelParallelStrategy")
    registry = getattr(strategies, registry_name)
    for registered in ("weft", "weft_tp"):
        made = registry.get(registered)
        assert type(made) is cls
        assert made.plan.is_auto


@pytest.mark.parametrize("name", PUBLIC)
def test_arguments_are_lightnings_and_ours(name: str) -> None:
    strategies, _ = PUBLIC[name]
    cls = importlib.import_module(name).WeftModelParallelStrategy
    ours = inspect.signature(cls).parameters
    for argument, stock in inspect.signature(strategies.ModelParallelStrategy).parameters.items():
        if argument == "parallelize_fn":
            assert ours[argument].default is None
        else:
            assert ours[argument].default == stock.default, argument
    assert list(ours)[-8:] == [
        "plan",
        "check_batches",
        "check_batches_every",
        "fused_optimizers",
        "empty_init",
        "optimizer_in_backward",
        "activation_checkpointing",
        "activation_offload",
    ]


def test_registering_again_changes_nothing() -> None:
    before = dict(lightning.pytorch.strategies.StrategyRegistry)
    factory.register_installed()
    assert dict(lightning.pytorch.strategies.StrategyRegistry) == before


def test_a_name_that_somebody_else_has_is_left_to_them() -> None:
    registry = lightning.pytorch.strategies.StrategyRegistry
    ours = registry.pop("weft")
    try:
        registry.register("weft", lightning.pytorch.strategies.DDPStrategy)
        with pytest.raises(ValueError, match=r"'weft' is registered in lightning\.pytorch\.strategies already"):
            factory.register_installed()
    finally:
        registry["weft"] = ours


def test_a_namespace_that_is_absent() -> None:
    absent = factory.Flavour("not_there", "not_there.x", "R", "not_there", object, "weft.not_there")
    with pytest.raises(ImportError, match="run `pip install not-there`"):
        factory.strategy_class(absent)


@pytest.mark.parametrize("name", PUBLIC)
@pytest.mark.parametrize(
    ("settings", "error", "remedy"),
    [
        ({"plan": "auto", "data_parallel_size": 2}, ValueError, "pass data_parallel_size=1"),
        ({"plan": {"a": "diagonal"}}, ValueError, "diagonal"),
        ({"plan": 3}, TypeError, "got a int"),
        ({"check_batches": -1}, ValueError, "check_batches=-1"),
        ({"check_batches_every": 0.5}, ValueError, "check_batches_every=0.5"),
        ({"fused_optimizers": "yes"}, ValueError, "fused_optimizers='yes'"),
        ({"empty_init": None}, ValueError, "empty_init=None"),
        ({"optimizer_in_backward": 1}, ValueError, "optimizer_in_backward=1"),
        ({"activation_checkpointing": True}, TypeError, "got True for what to checkpoint; pass 'none'"),
        ({"activation_checkpointing": [1]}, TypeError, "for what to checkpoint"),
        ({"activation_checkpointing": []}, TypeError, "for what to checkpoint"),
        ({"activation_offload": 0}, ValueError, "activation_offload=0"),
        ({"activation_offload": True}, ValueError, "activation_offload=True without checkpoints"),
    ],
)
def test_bad_settings(name: str, settings: dict, error: type[Exception], remedy: str) -> None:
    with pytest.raises(error, match=remedy):
        importlib.import_module(name).WeftModelParallelStrategy(**settings)


def test_parallelize_fn_must_be_callable() -> None:
    from weft.lightning.fabric import WeftModelParallelStrategy

    with pytest.raises(TypeError, match="plan=\\.\\.\\."):
        WeftModelParallelStrategy("auto")


@pytest.mark.parametrize("name", TRAINER_MODULES)
def test_sizes_are_refused_before_anything_is_launched(name: str) -> None:
    cls = importlib.import_module(name).WeftModelParallelStrategy
    trainer_class = {"weft.lightning": lightning.pytorch.Trainer}.get(name, pytorch_lightning.Trainer)
    with pytest.raises(RuntimeError, match=r"tensor_parallel_size=2 and 1 process .* pass devices=2"):
        trainer_class(accelerator="cpu", strategy=cls(plan="auto", tensor_parallel_size=2), logger=False)
    with pytest.raises(RuntimeError, match="tensor_parallel_size=2 and 4 processes"):
        trainer_class(accelerator="cpu", devices=4, strategy=cls(plan={}, tensor_parallel_size=2), logger=False)
