"""weft.strategy.faults: finds silent corruption: replicas that differ, and values that are not finite.

`replicas.py` compares tensors that several ranks hold; `training_state.py` lists those of a model and its optimizers.
`non_finite.py` finds gradients that are not finite; `module_watch.py` finds the module that made such a value first.
"""

from weft.strategy.faults.module_watch import ModuleWatch, Source
from weft.strategy.faults.non_finite import are_finite, is_set_on_any_rank, largest_values
from weft.strategy.faults.replicas import Comparison, Difference, Replica, compare_replicas, hash_of
from weft.strategy.faults.training_state import replicas_of

__all__ = [
    "Comparison",
    "Difference",
    "ModuleWatch",
    "Replica",
    "Source",
    "are_finite",
    "compare_replicas",
    "hash_of",
    "is_set_on_any_rank",
    "largest_values",
    "replicas_of",
]
