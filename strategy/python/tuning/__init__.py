"""weft.strategy.tuning: finds the layout with the shortest predicted step that fits into the memory of a device.

Start reading with `entry.py`, which searches the layouts of a configuration; the search is C++
(weft/strategy/tuning/search.h), and imports no torch. `modules.py` searches those of any module by dry runs.
`request.py` reads the cluster, the limits and the fixed sizes, and `layer_times.py` measured layer times; `result.py`
prints what was found, and `front.py` draws the fastest layout for each limit. `profile.py` measures the rates of CPU
ranks, and `layer_profile.py` the layer times of a model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weft.strategy.tuning.entry import tune_file, tune_training
from weft.strategy.tuning.front import draw_front
from weft.strategy.tuning.request import Cluster, read_cluster
from weft.strategy.tuning.result import FoundLayout, Tuning

if TYPE_CHECKING:
    from weft.strategy.tuning.modules import tune_module

__all__ = [
    "Cluster",
    "FoundLayout",
    "Tuning",
    "draw_front",
    "read_cluster",
    "tune_file",
    "tune_module",
    "tune_training",
]


def __getattr__(name: str) -> Any:
    if name == "tune_module":  # needs torch
        from weft.strategy.tuning.modules import tune_module

        return tune_module
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
