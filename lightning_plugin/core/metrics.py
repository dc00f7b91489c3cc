"""Makes torchmetrics metrics synchronize over the data ranks: over all ranks, equal batches would count repeatedly."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch.distributed as dist
from torch.nn import Module

_configured: weakref.WeakSet[Any] = weakref.WeakSet()  # metrics whose group was set here


def synchronize_metrics_over(group: dist.ProcessGroup, module: Module) -> None:
    """Have every metric inside a module synchronize over `group`, unless the user has given it a group."""
    torchmetrics = sys.modules.get("torchmetrics")
    if torchmetrics is None:  # without torchmetrics there are no metrics
        return
    for metric in module.modules():
        if isinstance(metric, torchmetrics.Metric) and (metric.process_group is None or metric in _configured):
            metric.process_group = group
            _configured.add(metric)
