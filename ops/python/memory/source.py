"""Where the figures of `weft.memory` come from: this process's counter, or the ledger of a dry run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

from torch import Tensor

from weft import _memory


class Source(Protocol):
    """The functions of `weft._memory` that `weft.memory` calls; documented in <weft/ops/memory.h>."""

    def is_tracking(self) -> bool: ...
    def current(self) -> dict[str, int]: ...
    def peak(self) -> dict[str, int]: ...
    def phases(self) -> list[tuple[str, float, dict[str, int]]]: ...
    def reset_peak(self) -> None: ...
    def begin_phase(self, name: str, category: str, /) -> None: ...
    def set_category(self, tensor: Tensor, category: str, /) -> bool: ...
    def set_category_since(self, mark: int, from_: str, to: str, /) -> None: ...
    def mark(self) -> int: ...


_active: Source = _memory


def source() -> Source:
    """Return the current source."""
    return _active


def counts_this_process() -> bool:
    """Return whether the source is the counter of this process."""
    return _active is _memory


@contextlib.contextmanager
def reading_from(other: Source) -> Iterator[None]:
    """Inside, `weft.memory` reads from and writes to `other`, on all threads."""
    global _active  # noqa: PLW0603
    before, _active = _active, other
    try:
        yield
    finally:
        _active = before
