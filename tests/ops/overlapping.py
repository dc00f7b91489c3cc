"""Operators of a cut sequence in one way or the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import weft


@contextmanager
def overlapping(mode: weft.overlap.Mode) -> Iterator[None]:
    """The mode, on this rank; nothing measured before and after."""
    before = weft.overlap.mode()
    weft.overlap.set_mode(mode)
    weft.overlap.clear()
    try:
        yield
    finally:
        weft.overlap.set_mode(before)
        weft.overlap.clear()
