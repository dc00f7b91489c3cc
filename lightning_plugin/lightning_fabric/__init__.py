"""weft's strategy for `lightning_fabric`, even if `lightning` is installed; importing registers the names, too."""

from weft._plugin import factory

factory.register_installed()
WeftModelParallelStrategy = factory.strategy_class(factory.FABRIC_ALONE)

__all__ = ["WeftModelParallelStrategy"]
