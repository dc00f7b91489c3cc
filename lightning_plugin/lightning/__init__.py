"""weft's strategy and callbacks for the Trainer of `lightning`, or of `pytorch_lightning` if only that is installed.

    import weft.lightning
    trainer = Trainer(accelerator="cpu", devices=2, strategy="weft")

Importing registers the strings "weft", "weft_tp", "weft_fsdp" and "weft_2d" in every installed namespace, for Trainer
and Fabric.
"""

from weft._plugin import factory
from weft._plugin.consolidate import consolidate_checkpoint

factory.register_installed()
_FLAVOUR = factory.LIGHTNING_TRAINER if factory.LIGHTNING_TRAINER.is_installed else factory.PYTORCH_LIGHTNING
WeftModelParallelStrategy = factory.strategy_class(_FLAVOUR)
ThroughputMonitor = factory.callback_class(_FLAVOUR, "ThroughputMonitor")
MemoryMonitor = factory.callback_class(_FLAVOUR, "MemoryMonitor")

__all__ = ["MemoryMonitor", "ThroughputMonitor", "WeftModelParallelStrategy", "consolidate_checkpoint"]
