"""weft's strategy and callbacks for `pytorch_lightning`, even if `lightning` is installed.

Importing registers the strategy names, too.
"""

from weft._plugin import factory
from weft._plugin.consolidate import consolidate_checkpoint
from weft._plugin.newest import newest_checkpoint

factory.register_installed()
WeftModelParallelStrategy = factory.strategy_class(factory.PYTORCH_LIGHTNING)
ThroughputMonitor = factory.callback_class(factory.PYTORCH_LIGHTNING, "ThroughputMonitor")
MemoryMonitor = factory.callback_class(factory.PYTORCH_LIGHTNING, "MemoryMonitor")
ExpertMonitor = factory.callback_class(factory.PYTORCH_LIGHTNING, "ExpertMonitor")
ExpertBalance = factory.callback_class(factory.PYTORCH_LIGHTNING, "ExpertBalance")
HealthMonitor = factory.callback_class(factory.PYTORCH_LIGHTNING, "HealthMonitor")
Preemption = factory.callback_class(factory.PYTORCH_LIGHTNING, "Preemption")
PretrainedCheckpoint = factory.callback_class(factory.PYTORCH_LIGHTNING, "PretrainedCheckpoint")
ReplicaCheck = factory.callback_class(factory.PYTORCH_LIGHTNING, "ReplicaCheck")
NonFiniteCheck = factory.callback_class(factory.PYTORCH_LIGHTNING, "NonFiniteCheck")
Report = factory.callback_class(factory.PYTORCH_LIGHTNING, "Report")
BatchSizeFinder = factory.callback_class(factory.PYTORCH_LIGHTNING, "BatchSizeFinder")

__all__ = [
    "BatchSizeFinder",
    "ExpertBalance",
    "ExpertMonitor",
    "HealthMonitor",
    "MemoryMonitor",
    "NonFiniteCheck",
    "Preemption",
    "PretrainedCheckpoint",
    "ReplicaCheck",
    "Report",
    "ThroughputMonitor",
    "WeftModelParallelStrategy",
    "consolidate_checkpoint",
    "newest_checkpoint",
]
