"""Runs sequence-parallel operators in a given overlap mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import weft


@contextmanager
def overlapping(mode: weft.overlap.Mode) -> Iterator[None]:
    """Set the overlap mode on this rank; discard the overlap measurements before and after."""
    before = weft.overlap.mode()
    weft.overlap.set_mode(mode)
    weft.overlap.clear()
    try:
        yield
    finally:
        weft.overlap.set_mode(before)
        weft.overlap.clear()
