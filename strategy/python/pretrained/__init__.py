"""weft.strategy.pretrained: reads pretrained weights, each rank only its shards."""

from weft.strategy.pretrained.reading import PretrainedReport, load_pretrained

__all__ = ["PretrainedReport", "load_pretrained"]
