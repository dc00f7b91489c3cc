"""Pytest configuration for all Python tests. tests/README.md explains how tests run on ranks."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

_TESTS_FOLDER = str(Path(__file__).parent)
if _TESTS_FOLDER not in sys.path:
    sys.path.insert(0, _TESTS_FOLDER)

# oneDNN takes temporaries for bfloat16 products that depend on the processor's instructions; with these, bytes do not.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")
# Searches for a layout keep no results, unless a test says where.
os.environ["WEFT_CACHE_DIR"] = ""

DEVICE_MARKS = {"cuda", "gpu", "cuda_runtime", "nccl"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--extended", action="store_true", help="also run the cases of support/extended.py")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect tests without collections of garbage: imports and tests leave little of it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--extended"):
        extended = [item for item in items if item.get_closest_marker("extended")]
        config.hook.pytest_deselected(items=extended)
        items[:] = [item for item in items if item not in extended]
    _order_by_world_size(items)
    if any(mark.name in DEVICE_MARKS for item in items for mark in item.iter_markers()):
        _skip_without_device(items)


def pytest_collection_finish() -> None:
    """Exempt the collected tests from later collections of garbage, until the session ends."""
    gc.collect()
    gc.freeze()


def _skip_without_device(items: list[pytest.Item]) -> None:
    import torch

    from support import cuda_runtime

    if cuda_runtime.is_active():
        import weft  # noqa: F401  (before the operators that replace its own)

        cuda_runtime.load()
    # NCCL 2.30 or newer lets ranks share a GPU then; an older one reports an error.
    ranks_may_share = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" and torch.cuda.is_available()
    for item in items:
        marks = {mark.name: mark for mark in item.iter_markers()}
        reason = None
        if "cuda_runtime" in marks and not cuda_runtime.is_active():
            reason = "needs the CUDA runtime without a device: make test-cuda"
        elif "gpu" in marks and cuda_runtime.is_active():
            reason = f"needs a GPU: {marks['gpu'].args[0]}"
        elif marks.keys() & {"cuda", "gpu"} and not torch.cuda.is_available():
            reason = "needs a CUDA device, and torch finds none"
        elif "nccl" in marks and not cuda_runtime.is_active() and not ranks_may_share:
            reason = "needs a CUDA runtime without a device, or NCCL 2.30 with NCCL_MULTI_RANK_GPU_ENABLE=1"
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


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
    gc.unfreeze()
    # Only if a test has used ranks: do not import the pools just to close them.
    if "support.rank_pool" in sys.modules:
        sys.modules["support.rank_pool"].POOLS.close()
