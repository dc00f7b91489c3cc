"""weft.strategy: turns a plan into a parallel nn.Module, for plain PyTorch.

    from weft.strategy import Plan
    weft.parallelize(model, mesh, "auto")        # or a dict, YAML, JSON, a callable, a Plan
    print(weft.strategy.report(model))

`Mesh`, the arithmetic of shards and the plan's rules are C++ values in `weft.strategy._plan`.
"""

from weft.strategy._plan import AXIS_NAMES, STYLES, Mesh
from weft.strategy.activation_checkpointing import checkpoint_activations
from weft.strategy.apply import parallelize
from weft.strategy.deferred import deferred_init
from weft.strategy.export import export_local
from weft.strategy.fused_optimizers import fuse
from weft.strategy.gradients import check_replicated_gradients, gradient_fingerprint
from weft.strategy.in_backward import StepInBackward
from weft.strategy.local_tensor import local_of, local_parameters
from weft.strategy.plan import Plan
from weft.strategy.report import Report, Row, report

__all__ = [
    "AXIS_NAMES",
    "STYLES",
    "Mesh",
    "Plan",
    "Report",
    "Row",
    "StepInBackward",
    "check_replicated_gradients",
    "checkpoint_activations",
    "deferred_init",
    "export_local",
    "fuse",
    "gradient_fingerprint",
    "local_of",
    "local_parameters",
    "parallelize",
    "report",
]
