"""Keeps the results of searches in files, so that a run that begins again does not search again."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

import torch

import weft
from weft.strategy import _plan
from weft.strategy.plan import Plan
from weft.strategy.tuning.result import FoundLayout, Tuning


class ResultCache:
    """Files with the results of searches, each named by a hash of all that the search depends on.

    Args:
        folder: of the files; it is created with the first one.
    """

    def __init__(self, folder: Path) -> None:
        self.path_of_hit: Path | None = None  # of the file that `load` has read
        self._folder = folder

    @classmethod
    def of_environment(cls) -> ResultCache | None:
        """Return the cache in $WEFT_CACHE_DIR, or else in the user's folder of caches; None: the variable is empty."""
        given = os.environ.get("WEFT_CACHE_DIR")
        if given == "":
            return None
        root = Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "weft"
        return cls(root / "layouts")

    def key_of(self, **values: Any) -> str:
        """Return the key of a search with these arguments on this host, with the installed versions."""
        versions = (weft.__version__, os.stat(_plan.__file__).st_mtime_ns, torch.__version__, platform.node())
        text = json.dumps({"versions": versions, **values}, sort_keys=True, default=_describe)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def path_of(self, key: str) -> Path:
        return self._folder / f"{key}.json"

    def load(self, key: str) -> Tuning | None:
        """Return the result with this key; None: there is none, or its file cannot be read."""
        try:
            found = _tuning_of(json.loads(self.path_of(key).read_text()))
        except (OSError, ValueError, TypeError, KeyError):
            return None
        self.path_of_hit = self.path_of(key)
        return found

    def store(self, key: str, found: Tuning) -> None:
        """Write a result, at once or not at all; where the folder cannot be written, nothing is kept."""
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._folder, suffix=".part", delete=False) as file:
                json.dump(dataclasses.asdict(found), file, default=_describe)
            Path(file.name).replace(self.path_of(key))


def _tuning_of(content: dict[str, Any]) -> Tuning:
    layouts, front = (tuple(_layout_of(each) for each in content[name]) for name in ("layouts", "front"))
    smallest = content["smallest"]
    return Tuning(
        **{
            **content,
            "layouts": layouts,
            "front": front,
            "smallest": None if smallest is None else _layout_of(smallest),
            "rejections": tuple((name, reason) for name, reason in content["rejections"]),
        }
    )


def _layout_of(content: dict[str, Any]) -> FoundLayout:
    return FoundLayout(**{**content, "pipeline_cuts": tuple(content["pipeline_cuts"])})


def _describe(value: Any) -> Any:
    """Return plain data that is the same for equal options."""
    if isinstance(value, Plan):
        return value.to_json()
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return repr(value)
