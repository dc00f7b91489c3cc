"""weft.strategy.data_parallel: replicates or shards one model over ranks with different data (ZeRO stages 0 to 3).

The ZeRO stages are those of Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models"
(2020). Stage 0 replicates everything (GradientReducer), 1 shards the optimizer's states (GradientReducer and
ShardedStates), 2 also the gradients and 3 also the parameters (both by apply_fsdp, with FSDP2).
"""

from weft.strategy.data_parallel.clipping import clip_gradients_by_norm
from weft.strategy.data_parallel.fully_sharded import apply_fsdp
from weft.strategy.data_parallel.reducer import GradientReducer
from weft.strategy.data_parallel.sharded_states import ShardedStates, sharded_states_of, steps_elements_alone

__all__ = [
    "GradientReducer",
    "ShardedStates",
    "apply_fsdp",
    "clip_gradients_by_norm",
    "sharded_states_of",
    "steps_elements_alone",
]
