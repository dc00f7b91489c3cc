"""weft's Trainer strategy and callbacks for `lightning`, or for `pytorch_lightning` if `lightning` is not installed.

    import weft.lightning
    trainer = Trainer(accelerator="cpu", devices=2, strategy="weft")

Importing registers the strategies "weft", "weft_tp", "weft_fsdp" and "weft_2d" for the Trainer and Fabric of every
installed package: `lightning`, `pytorch_lightning`, `lightning_fabric`.
"""

from weft._plugin import factory
from weft._plugin.consolidate import consolidate_checkpoint
from weft._plugin.newest import newest_checkpoint

factory.register_installed()
_FLAVOUR = factory.LIGHTNING_TRAINER if factory.LIGHTNING_TRAINER.is_installed else factory.PYTORCH_LIGHTNING
WeftModelParallelStrategy = factory.strategy_class(_FLAVOUR)
ThroughputMonitor = factory.callback_class(_FLAVOUR, "ThroughputMonitor")
MemoryMonitor = factory.callback_class(_FLAVOUR, "MemoryMonitor")
ExpertMonitor = factory.callback_class(_FLAVOUR, "ExpertMonitor")
ExpertBalance = factory.callback_class(_FLAVOUR, "ExpertBalance")
HealthMonitor = factory.callback_class(_FLAVOUR, "HealthMonitor")
Preemption = factory.callback_class(_FLAVOUR, "Preemption")
PretrainedCheckpoint = factory.callback_class(_FLAVOUR, "PretrainedCheckpoint")
ReplicaCheck = factory.callback_class(_FLAVOUR, "ReplicaCheck")
NonFiniteCheck = factory.callback_class(_FLAVOUR, "NonFiniteCheck")
Report = factory.callback_class(_FLAVOUR, "Report")
BatchSizeFinder = factory.callback_class(_FLAVOUR, "BatchSizeFinder")

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
