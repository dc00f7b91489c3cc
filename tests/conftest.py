"""Pytest configuration for all Python tests. tests/README.md explains how tests run on ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

_TESTS_FOLDER = str(Path(__file__).parent)
if _TESTS_FOLDER not in sys.path:
    sys.path.insert(0, _TESTS_FOLDER)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cuda: needs a CUDA device; skipped where there is none")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    _order_by_world_size(items)
    marked = [item for item in items if item.get_closest_marker("cuda") is not None]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch finds none"))


def _order_by_world_size(items: list[pytest.Item]) -> None:
    """Sort each file's tests by world size: few rank pools exist at a time, and restarting a closed one is slow."""
    places: dict[Path, int] = {}
    for item in items:
        places.setdefault(item.path, len(places))

    def world_size(item: pytest.Item) -> int:
        callspec = getattr(item, "callspec", None)
        return callspec.params.get("world_size", 0) if callspec is not None else 0

    items.sort(key=lambda item: (places[item.path], world_size(item)))


def pytest_unconfigure() -> None:
    # Only if a test has used ranks: do not import the pools just to close them.
    if "support.rank_pool" in sys.modules:
        sys.modules["support.rank_pool"].POOLS.close()
