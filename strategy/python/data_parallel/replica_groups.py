"""The groups of ranks that hold equal local parameters, over which their gradients are averaged."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from weft.strategy.experts.shards import is_expert


class ReplicaGroups:
    """Finds the group of a parameter.

    group: the group of all parameters but experts. experts: that of experts which are sharded over expert_parallel;
    None: `group`.
    """

    def __init__(self, group: dist.ProcessGroup, experts: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.experts = experts

    def of(self, parameter: Tensor) -> dist.ProcessGroup:
        """Return the ranks that hold the same local values of a parameter as this rank."""
        return self.experts if self.experts is not None and is_expert(parameter) else self.group
