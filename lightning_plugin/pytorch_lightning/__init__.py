"""weft's strategy for the Trainer of `pytorch_lightning`, whatever else is installed; registers the names too."""

from weft._plugin import factory

factory.register_installed()
WeftModelParallelStrategy = factory.strategy_class(factory.PYTORCH_LIGHTNING)

__all__ = ["WeftModelParallelStrategy"]
