"""A module that the user's code compiles trains as on one device, or raises an error on all ranks."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_plugin.compiled_models import PLACES, fabric_losses, fit

from support.ranks import run_on_ranks

LIGHTNINGS_OWN = "RuntimeError: Using a compiled model is incompatible with the current strategy"
IN_STAGES = (
    "ValueError: WeftModelParallelStrategy got the compiled module 'model', and torch.compile cannot trace a forward "
    "that is divided into stages; compile its blocks instead."
)
FEW = ("module", "model in __init__", "blocks")
EXTENDED = pytest.mark.extended


@functools.cache
def _expected() -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        [found] = run_on_ranks(1, fit, folder=folder, layout="", places=("",), backend="eager")
    values: list[Any] = found[""]
    return values


@pytest.mark.parametrize(
    ("layout", "places"),
    [
        ("tp2", FEW),
        ("pp2", PLACES),
        pytest.param("tp2", PLACES, marks=EXTENDED),
        pytest.param("dp2,tp2", FEW, marks=EXTENDED),
    ],
)
def test_trainer_trains_compiled_models(tmp_path: Path, layout: str, places: tuple[str, ...]) -> None:
    expected, validated, num_graphs = _expected()
    assert num_graphs == 0
    world_size = 4 if layout == "dp2,tp2" else 2
    results = run_on_ranks(world_size, fit, folder=str(tmp_path), layout=layout, places=places, backend="eager")
    for found in results:
        assert list(found) == list(places)
        for place, result in found.items():
            if place == "module":
                assert result.startswith(LIGHTNINGS_OWN)
            elif layout == "pp2" and place != "blocks":
                assert result == IN_STAGES
            else:
                assert not isinstance(result, str), f"{place}: {result}"
                values, loss, num_graphs = result
                torch.testing.assert_close(values, {name: expected[name] for name in values}, rtol=1e-10, atol=1e-12)
                assert loss == pytest.approx(validated, rel=1e-6) and num_graphs > 0


@pytest.mark.parametrize(("layout", "world_size"), [("tp2", 2), pytest.param("dp2,tp2", 4, marks=pytest.mark.extended)])
def test_fabric_trains_a_compiled_model(layout: str, world_size: int) -> None:
    [(losses, expected)] = run_on_ranks(1, fabric_losses, layout="")
    for found_losses, values in run_on_ranks(world_size, fabric_losses, layout=layout):
        assert found_losses == pytest.approx(losses, rel=1e-9)
        torch.testing.assert_close(values, expected, rtol=1e-10, atol=1e-12)
