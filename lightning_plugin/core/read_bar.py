"""A progress bar for the bytes that a rank reads from files of pretrained weights while its model is sharded."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn import Module


class ReadBar:
    """Shows the bytes read of the bytes to read on this rank, once there is something to read; nothing if disabled.

    The bytes to read are the estimate of `weft.strategy.pretrained.progress.ReadProgress`.
    """

    def __init__(self, is_enabled: bool) -> None:
        self._is_enabled = is_enabled
        self._bar: Any = None
        self._progress: Any = None

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Inside, show the bar at the first read."""
        if not self._is_enabled:
            yield
            return
        from weft.strategy.pretrained.progress import ReadProgress

        self._progress = ReadProgress(self._show)
        try:
            with self._progress.follow():
                yield
            if self._bar is not None:
                self._bar.total = self._bar.n  # tensors that nothing needed were expected, too
        finally:
            if self._bar is not None:
                self._bar.close()

    def expect(self, module: Module) -> None:
        """Add the bytes that the deferred tensors of a module will read."""
        if self._progress is not None:
            self._progress.expect_module(module)

    def _show(self, num_read: int, num_to_read: int) -> None:
        if self._bar is None:
            from tqdm import tqdm

            # On the stream of Lightning's own bars, so that the lines keep their order.
            settings = {"unit": "B", "unit_scale": True, "dynamic_ncols": True, "file": sys.stdout}
            self._bar = tqdm(desc="weft reads weights", total=num_to_read, **settings)
        self._bar.total = num_to_read
        self._bar.update(num_read - self._bar.n)
