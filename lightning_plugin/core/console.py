"""Logs and warnings of weft's strategies, on the first rank only, as Lightning prints its own."""

from __future__ import annotations

import importlib


class Console:
    """Prints through Lightning's functions; `fabric_module`: the package that has them, such as "lightning.fabric"."""

    def __init__(self, fabric_module: str) -> None:
        self._rank_zero_module = f"{fabric_module}.utilities.rank_zero"
        self._logged_once: set[str] = set()

    def log(self, text: str) -> None:
        importlib.import_module(self._rank_zero_module).rank_zero_info(text)

    def log_once(self, text: str) -> None:
        if text not in self._logged_once:
            self._logged_once.add(text)
            self.log(text)

    def warn(self, text: str) -> None:
        importlib.import_module(self._rank_zero_module).rank_zero_warn(text)
