"""weft.strategy.data_parallel: replicates or shards one model over ranks with different data (ZeRO stages 0 to 3).

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), name the stages: 0
replicates everything (GradientReducer), 1 shards the optimizer's states (with ShardedStates, too), 2 the gradients and
3 the parameters (shard_fully, by FSDP2).
"""

from weft.strategy.data_parallel.clipping import clip_gradients_by_norm
from weft.strategy.data_parallel.fully_sharded import shard_fully
from weft.strategy.data_parallel.reducer import GradientReducer
from weft.strategy.data_parallel.sharded_states import ShardedStates, sharded_states_of, steps_elements_alone

__all__ = [
    "GradientReducer",
    "ShardedStates",
    "clip_gradients_by_norm",
    "shard_fully",
    "sharded_states_of",
    "steps_elements_alone",
]
