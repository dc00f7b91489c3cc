"""weft.strategy.sharding: how parameters and activations are sharded, and how a forward sees this rank's shard.

`state.py` is what a parallelized module stores; all other packages read it.
"""
