"""The axis over which experts are sharded."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor

EXPERT_AXIS = "expert_parallel"


def is_expert(parameter: Tensor) -> bool:
    """Return whether a parameter belongs to experts that are sharded over the axis expert_parallel."""
    return isinstance(parameter, DTensor) and EXPERT_AXIS in (parameter.device_mesh.mesh_dim_names or ())
