"""weft.strategy.estimate: how much memory each rank of a training takes, from a configuration.

Start reading with `entry.py`. `config.py` reads the configuration, `stages.py` predicts the activations of pipeline
stages. `state.py` counts the states of pipelines and of models that the memory model does not know; only it imports
torch.
"""

from weft.strategy.estimate.entry import Estimate, RankEstimate, estimate, estimate_file, estimate_training

__all__ = ["Estimate", "RankEstimate", "estimate", "estimate_file", "estimate_training"]
