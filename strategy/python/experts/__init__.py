"""Expert parallelism: the experts of a model's layers are sharded over ranks with different data.

`parallelize_experts` recognises the modules that hold experts, and keeps this rank's experts in each. Their forwards
send each token to the ranks of its experts and back, by the operators of `weft.experts`.
"""

from weft.strategy.experts.entry import parallelize_experts
from weft.strategy.experts.layer import has_own_tokens
from weft.strategy.experts.lists import find_expert_lists
from weft.strategy.experts.recognition import ExpertsLayout, find_experts, num_experts_of
from weft.strategy.experts.shards import EXPERT_AXIS, is_expert

__all__ = [
    "EXPERT_AXIS",
    "ExpertsLayout",
    "find_expert_lists",
    "find_experts",
    "has_own_tokens",
    "is_expert",
    "num_experts_of",
    "parallelize_experts",
]
