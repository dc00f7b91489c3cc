"""weft.strategy.recognition: which modules of a model can be sharded, and which styles they are assigned."""
