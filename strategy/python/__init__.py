"""weft.strategy: turns a plan into a parallel nn.Module, for plain PyTorch.

    from weft.strategy import Plan
    weft.parallelize(model, mesh, "auto")        # or a dict, YAML, JSON, a callable, a Plan
    print(weft.strategy.report(model))

`Mesh`, the arithmetic of shards, the plan's rules and the memory model are C++ values in `weft.strategy._plan`. Names
are loaded at their first use, so that `weft estimate` does without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.strategy._plan import AXIS_NAMES, STYLES, Mesh
    from weft.strategy.activation_checkpointing import checkpoint_activations
    from weft.strategy.apply import parallelize
    from weft.strategy.comparison import Comparison, compare
    from weft.strategy.deferred import deferred_init
    from weft.strategy.export import export_local
    from weft.strategy.full_results import full, local_parameters
    from weft.strategy.fused_optimizers import fuse
    from weft.strategy.gradients import check_replicated_gradients, gradient_fingerprint
    from weft.strategy.in_backward import StepInBackward
    from weft.strategy.local_tensor import local_of
    from weft.strategy.pipeline import Pipeline
    from weft.strategy.pipeline.draw import draw
    from weft.strategy.plan import Plan
    from weft.strategy.rank_reports import RankReports, rank_reports
    from weft.strategy.report_table import Report, Row, report

_MODULES = {
    "_plan": ("AXIS_NAMES", "STYLES", "Mesh"),
    "activation_checkpointing": ("checkpoint_activations",),
    "apply": ("parallelize",),
    "comparison": ("Comparison", "compare"),
    "deferred": ("deferred_init",),
    "export": ("export_local",),
    "fused_optimizers": ("fuse",),
    "full_results": ("full", "local_parameters"),
    "gradients": ("check_replicated_gradients", "gradient_fingerprint"),
    "in_backward": ("StepInBackward",),
    "local_tensor": ("local_of",),
    "pipeline": ("Pipeline", "draw"),
    "plan": ("Plan",),
    "rank_reports": ("RankReports", "rank_reports"),
    "report_table": ("Report", "Row", "report"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "AXIS_NAMES",
    "STYLES",
    "Comparison",
    "Mesh",
    "Pipeline",
    "Plan",
    "RankReports",
    "Report",
    "Row",
    "StepInBackward",
    "check_replicated_gradients",
    "checkpoint_activations",
    "compare",
    "deferred_init",
    "draw",
    "export_local",
    "full",
    "fuse",
    "gradient_fingerprint",
    "local_of",
    "local_parameters",
    "parallelize",
    "rank_reports",
    "report",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'weft.strategy' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"weft.strategy.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
