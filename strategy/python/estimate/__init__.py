"""weft.strategy.estimate: predicts how much memory each rank of a training needs, from a configuration.

Start reading with `entry.py`. `config.py` reads the configuration, `stages.py` decides what the memory model describes.
`state.py`, the only file that imports torch, counts parameters, gradients and optimizer states of what it does not.
"""

from weft.strategy.estimate.entry import Estimate, RankEstimate, estimate, estimate_file, estimate_training

__all__ = ["Estimate", "RankEstimate", "estimate", "estimate_file", "estimate_training"]
