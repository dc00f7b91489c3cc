"""weft.strategy: parallelizes an nn.Module by a plan; needs PyTorch, but not Lightning.

    weft.parallelize(model, mesh, "auto")        # or a dict, YAML, JSON, a callable, a weft.strategy.Plan
    print(weft.strategy.report(model))

`Mesh`, the rules of plans, the arithmetic of shards, pipeline schedules and the memory model are C++ values and
functions in `weft.strategy._plan`. Names are loaded at their first use, so that `weft estimate` can run without torch.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from weft.strategy._aliases import Aliases

if TYPE_CHECKING:
    from weft.strategy._plan import AXIS_NAMES, STYLES, Mesh
    from weft.strategy.affinity import spread_ranks
    from weft.strategy.apply import parallelize
    from weft.strategy.comparison import Comparison, compare
    from weft.strategy.deferred import deferred_init
    from weft.strategy.export import export_local
    from weft.strategy.full_results import full, local_parameters
    from weft.strategy.modules.activation_checkpointing import checkpoint_activations
    from weft.strategy.modules.compiled_blocks import compile_blocks
    from weft.strategy.modules.gate_up import join_gate_up
    from weft.strategy.optimizers.fused_optimizers import fuse
    from weft.strategy.optimizers.grad_scaler import agree_on_overflow
    from weft.strategy.optimizers.in_backward import StepInBackward
    from weft.strategy.optimizers.offload import offload_states
    from weft.strategy.pipeline import Pipeline
    from weft.strategy.pipeline.draw import draw
    from weft.strategy.plan import Plan
    from weft.strategy.pretrained import PretrainedReport, convert, load_pretrained, save_pretrained
    from weft.strategy.reports.rank_reports import RankReports, rank_reports
    from weft.strategy.reports.report_table import Report, Row, report
    from weft.strategy.sharding.gradients import check_replicated_gradients, gradient_fingerprint
    from weft.strategy.sharding.local_tensor import local_of

_MODULES = {
    "_plan": ("AXIS_NAMES", "STYLES", "Mesh"),
    "affinity": ("spread_ranks",),
    "apply": ("parallelize",),
    "comparison": ("Comparison", "compare"),
    "deferred": ("deferred_init",),
    "export": ("export_local",),
    "full_results": ("full", "local_parameters"),
    "modules.activation_checkpointing": ("checkpoint_activations",),
    "modules.compiled_blocks": ("compile_blocks",),
    "modules.gate_up": ("join_gate_up",),
    "optimizers.fused_optimizers": ("fuse",),
    "optimizers.grad_scaler": ("agree_on_overflow",),
    "optimizers.in_backward": ("StepInBackward",),
    "optimizers.offload": ("offload_states",),
    "pipeline": ("Pipeline", "draw"),
    "plan": ("Plan",),
    "pretrained": ("PretrainedReport", "convert", "load_pretrained", "save_pretrained"),
    "reports.rank_reports": ("RankReports", "rank_reports"),
    "reports.report_table": ("Report", "Row", "report"),
    "sharding.gradients": ("check_replicated_gradients", "gradient_fingerprint"),
    "sharding.local_tensor": ("local_of",),
}
# Documented module path -> the module's real path; both relative to weft.strategy.
_ALIASES = {
    "activation_checkpointing": "modules.activation_checkpointing",
    "fused_optimizers": "optimizers.fused_optimizers",
    "in_backward": "optimizers.in_backward",
    "local_tensor": "sharding.local_tensor",
    "report_table": "reports.report_table",
}
sys.meta_path.append(Aliases(__name__, _ALIASES))

_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "AXIS_NAMES",
    "STYLES",
    "Comparison",
    "Mesh",
    "Pipeline",
    "Plan",
    "PretrainedReport",
    "RankReports",
    "Report",
    "Row",
    "StepInBackward",
    "agree_on_overflow",
    "check_replicated_gradients",
    "checkpoint_activations",
    "compare",
    "compile_blocks",
    "convert",
    "deferred_init",
    "draw",
    "export_local",
    "full",
    "fuse",
    "gradient_fingerprint",
    "join_gate_up",
    "load_pretrained",
    "local_of",
    "local_parameters",
    "offload_states",
    "parallelize",
    "rank_reports",
    "report",
    "save_pretrained",
    "spread_ranks",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'weft.strategy' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"weft.strategy.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
