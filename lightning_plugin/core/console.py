"""Logs and warnings of weft's strategies, through Lightning's functions for global rank 0."""

from __future__ import annotations

import importlib


class Console:
    """Logs and warns on global rank 0; `fabric_module`: the module of Fabric, such as "lightning.fabric"."""

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
