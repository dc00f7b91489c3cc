"""Keeps the results of searches in files, so that a run that begins again does not search again."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import weft
from weft.strategy import _plan
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
        """Return the cache in $WEFT_CACHE_DIR, or else in the user's folder of caches.

        None: the variable is empty, or the user has no home folder.
        """
        given = os.environ.get("WEFT_CACHE_DIR")
        if given == "":
            return None
        try:
            folder = Path(given or os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        except RuntimeError:
            return None
        return cls((folder if given else folder / "weft") / "layouts")

    def key_of(self, **values: Any) -> str:
        """Return the key of a search with these arguments on this host, with the code of the search.

        `values`: plain data, dataclasses, classes and functions, which their names stand for.
        """
        host = (platform.node(), torch.get_num_threads())
        versions = (weft.__version__, torch.__version__, *(path.stat().st_mtime_ns for path in _sources()))
        text = json.dumps({"host": host, "versions": versions, **values}, sort_keys=True, default=_describe)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def path_of(self, key: str) -> Path:
        return self._folder / f"{key}.json"

    def load(self, key: str) -> Tuning | None:
        """Return the result with this key; None: there is none, or its file cannot be read."""
        self.path_of_hit = None
        try:
            found = _tuning_of(json.loads(self.path_of(key).read_text()))
        except (OSError, ValueError, TypeError, KeyError):
            return None
        self.path_of_hit = self.path_of(key)
        return found

    def store(self, key: str, found: Tuning) -> None:
        """Write a result, at once or not at all; where the folder cannot be written, nothing is kept."""
        part = self._folder / f"{key}.{platform.node()}.{os.getpid()}.part"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(dataclasses.asdict(found), default=_describe))
            part.replace(self.path_of(key))
        except OSError:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)


def _sources() -> Iterator[Path]:
    """Yield the files that decide what a search finds; an edited one makes earlier results invalid."""
    own = Path(__file__).parent
    for folder in (own, own.parent / "dry_run"):
        yield from sorted(folder.glob("*.py"))
    yield Path(_plan.__file__)


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
            "offload": tuple(content["offload"]),
        }
    )


def _layout_of(content: dict[str, Any]) -> FoundLayout:
    return FoundLayout(**{**content, "pipeline_cuts": tuple(content["pipeline_cuts"])})


def _describe(value: Any) -> Any:
    """Return plain data that is the same for equal options."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return repr(value)
