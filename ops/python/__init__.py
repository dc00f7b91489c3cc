"""weft: tensor-parallel operators, modules and plans for PyTorch.

`import weft` loads the C++ operators (`torch.ops.weft.*`, typed in `weft.ops`) and the modules over them
(`weft.nn`), and registers the c10d backend `weft` (`weft.collectives`). `weft.strategy` is loaded at first use, and
with it `weft.parallelize`, `weft.export_local` and `weft.Plan`; the Lightning and Fabric strategies register
themselves on `import weft.lightning`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from weft._library import load_library

load_library()

from weft import collectives, memory, nn, ops  # noqa: E402  (they look the operators up)
from weft.collectives import (  # noqa: E402
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    GroupAbortedError,
    PeerLostError,
)

collectives.register()
memory.counter.track_if_asked()

if TYPE_CHECKING:
    from weft import strategy
    from weft.strategy import Plan, export_local, parallelize

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
    "memory",
    "nn",
    "ops",
    "parallelize",
    "strategy",
]

_FROM_STRATEGY = frozenset({"Plan", "export_local", "parallelize"})


def __getattr__(name: str) -> Any:
    if name == "strategy":
        return importlib.import_module("weft.strategy")
    if name in _FROM_STRATEGY:
        return getattr(importlib.import_module("weft.strategy"), name)
    raise AttributeError(f"module 'weft' has no attribute {name!r}")
