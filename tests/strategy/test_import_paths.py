"""Documented paths of modules of weft.strategy, and paths of classes in pickled objects."""

from __future__ import annotations

import importlib

import pytest

import weft.strategy


@pytest.mark.parametrize(
    "path",
    [
        "activation_checkpointing.checkpoint_activations",
        "apply.parallelize",
        "comparison.compare",
        "deferred.deferred_init",
        "estimate.Estimate",
        "estimate.estimate_file",
        "export.export_local",
        "export_layers.ColumnLayer",  # in pickled copies
        "full_results.full",
        "fused_optimizers.fuse",
        "in_backward.StepInBackward",
        "local_tensor.local_of",
        "plan.Plan",  # in pickled hyperparameters
        "report_table.Report",
    ],
)
def test_path_is_importable(path: str) -> None:
    module, name = path.split(".")
    value = getattr(importlib.import_module(f"weft.strategy.{module}"), name)
    assert value is getattr(importlib.import_module(value.__module__), name)


@pytest.mark.parametrize(("alias", "module"), weft.strategy._ALIASES.items())
def test_alias_is_the_module(alias: str, module: str) -> None:
    found = importlib.import_module(f"weft.strategy.{alias}")
    assert found is importlib.import_module(f"weft.strategy.{module}") is getattr(weft.strategy, alias)
    assert found.__name__ == f"weft.strategy.{module}" and found.__spec__.name == found.__name__
