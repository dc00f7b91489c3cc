"""weft: tensor-parallel operators, modules and plans for PyTorch.

`import weft` loads the C++ operators (`torch.ops.weft.*`, typed in `weft.ops`) and the modules over them
(`weft.nn`), and registers the c10d backend `weft` (`weft.collectives`). `weft.parallelize`, `weft.load_pretrained`,
`weft.save_pretrained`, `weft.export_local` and `weft.Plan` are those of `weft.strategy`, which is loaded at first use.
`import weft.lightning` registers the Lightning and Fabric strategies.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft import collectives, memory, nn, ops, overlap, pipeline_links, strategy
    from weft.collectives import (
        CollectiveError,
        CollectiveMismatchError,
        CollectiveTimeoutError,
        GroupAbortedError,
        PeerLostError,
    )
    from weft.strategy import Plan, export_local, load_pretrained, parallelize, save_pretrained

__version__ = "0.1.0"
__all__ = [
    "CollectiveError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "GroupAbortedError",
    "PeerLostError",
    "Plan",
    "collectives",
    "export_local",
    "load_pretrained",
    "memory",
    "nn",
    "ops",
    "overlap",
    "parallelize",
    "pipeline_links",
    "save_pretrained",
    "strategy",
]

_MODULES = ("collectives", "memory", "nn", "ops", "overlap", "pipeline_links")
_FROM_STRATEGY = frozenset({"Plan", "export_local", "load_pretrained", "parallelize", "save_pretrained"})


def _load() -> None:
    """Load the operators, register the backend, and apply the variables WEFT_MEMORY, WEFT_OVERLAP(_TABLE)."""
    from weft._library import load_library

    load_library()
    for name in _MODULES:  # after load_library: these modules look up operators
        importlib.import_module(f"weft.{name}")
    from weft import collectives, memory, overlap

    collectives.register()
    memory.counter.track_if_requested()
    overlap.apply_environment()
    globals().update({name: getattr(collectives, name) for name in __all__ if name.endswith("Error")})


def _needs_operators() -> bool:
    """Return whether to load torch and the operators; the command `weft estimate` does without them."""
    command = sys.modules.get("weft_command")
    return command is None or command.needs_operators


if _needs_operators():
    _load()


def __getattr__(name: str) -> Any:
    if name == "strategy":
        return importlib.import_module("weft.strategy")
    if name in _FROM_STRATEGY:
        return getattr(importlib.import_module("weft.strategy"), name)
    raise AttributeError(f"module 'weft' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
