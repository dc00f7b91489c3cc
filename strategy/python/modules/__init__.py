"""weft.strategy.modules: what the classes of parallelized modules compute, and what they save for the backward."""
