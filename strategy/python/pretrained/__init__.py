"""weft.strategy.pretrained: reads and writes pretrained weights; each rank reads only its shards."""

from weft.strategy.pretrained.checkpoints import convert
from weft.strategy.pretrained.reading import PretrainedReport, load_pretrained
from weft.strategy.pretrained.writing import save_pretrained

__all__ = ["PretrainedReport", "convert", "load_pretrained", "save_pretrained"]
