"""weft's strategy for Fabric: `lightning.fabric`'s, or `lightning_fabric`'s where that alone is installed."""

from weft._plugin import factory

factory.register_installed()
_FLAVOUR = factory.LIGHTNING_FABRIC if factory.LIGHTNING_FABRIC.is_installed else factory.FABRIC_ALONE
WeftModelParallelStrategy = factory.strategy_class(_FLAVOUR)

__all__ = ["WeftModelParallelStrategy"]
