"""weft's strategy for `lightning.fabric`, or for `lightning_fabric` if only that is installed."""

from weft._plugin import factory

factory.register_installed()
_FLAVOUR = factory.LIGHTNING_FABRIC if factory.LIGHTNING_FABRIC.is_installed else factory.FABRIC_ALONE
WeftModelParallelStrategy = factory.strategy_class(_FLAVOUR)

__all__ = ["WeftModelParallelStrategy"]
