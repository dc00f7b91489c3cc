"""Counts the memory of a test, exactly, in processes that hold tensors of other tests."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import weft


class Count:
    """Bytes in use, less the bytes in use when this object was created."""

    def __init__(self) -> None:
        self._before = weft.memory.by_category()

    def now(self, category: str | None = None) -> int:
        return self._difference(weft.memory.by_category(), category)

    def peak(self, category: str | None = None) -> int:
        return self._difference(weft.memory.by_category(at="peak"), category)

    def _difference(self, usage: dict[str, int], category: str | None) -> int:
        categories = usage if category is None else (category,)
        return sum(usage[name] - self._before[name] for name in categories)


@contextmanager
def counted() -> Iterator[Count]:
    """Count the memory that the body allocates."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tensors of earlier tests may exist
        weft.memory.track()
    gc.collect()
    weft.memory.begin_phase("test")
    weft.memory.reset_peak()
    try:
        yield Count()
    finally:
        weft.memory.begin_phase("between tests")
