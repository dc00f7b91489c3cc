"""Each feature of docs/drop_in_features.md does on each layout what it does on one device, or raises its error."""

from __future__ import annotations

import functools
import importlib.util
import tempfile
from pathlib import Path
from typing import Any

import pytest
from lightning_plugin.drop_in.features import FEATURES, Feature, Function
from lightning_plugin.drop_in.models import LAYOUTS, assert_same
from lightning_plugin.drop_in.trainer_runs import loaders, modes, monitors

from support.ranks import run_on_ranks


@functools.cache
def _found(function: Function, layout: str) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        return run_on_ranks(LAYOUTS.get(layout, 1), function, folder=folder, layout=layout)


def _marks(feature: Feature, layout: str) -> list[pytest.MarkDecorator]:
    """Leave out of `make test` what data-parallel ranks do not change, and the loaders of one data-parallel rank."""
    is_left_out = feature.function in {"dp2,tp2": (monitors, modes), "tp2": (loaders,)}.get(layout, ())
    return [pytest.mark.extended] if is_left_out else []


@pytest.mark.parametrize(
    ("feature", "layout"),
    [
        pytest.param(feature, layout, id=f"{feature.name}-{layout}", marks=_marks(feature, layout))
        for layout in LAYOUTS
        for feature in FEATURES
        if layout in feature.layouts
    ],
)
def test_feature_is_as_on_one_device(feature: Feature, layout: str) -> None:
    if feature.needs and importlib.util.find_spec(feature.needs) is None:
        pytest.skip(f"{feature.name} needs the package {feature.needs}, which is not installed")
    results = [result[feature.name] for result in _found(feature.function, layout)]
    if layout in feature.refused:
        for result in results:
            assert isinstance(result, str) and feature.refused[layout] in result, result
        return
    [on_one_device] = _found(feature.function, "")
    expected = on_one_device[feature.name]
    assert expected is not None and not isinstance(expected, str), expected
    assert any(result is not None for result in results)
    for result in results:
        if result is not None:  # only the first rank reports
            assert not isinstance(result, str), result
            assert_same(result, expected)


def test_page_is_up_to_date() -> None:
    path = Path(__file__).resolve().parents[3] / "docs/generate_drop_in.py"
    spec = importlib.util.spec_from_file_location("generate_drop_in", path)
    assert spec is not None and spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    text = generator.PAGE.read_text()
    assert generator.page(text) == text, "run `python docs/generate_drop_in.py`"
