"""weft.strategy.comparison: trains a model sharded and unsharded, and finds where the two differ.

Start reading with `entry.py` (the arguments), then `training.py` (a step of both sides). `subject.py` builds the model,
`sharded.py` shards it, `outputs.py` finds the first output that differs, `launch.py` starts the ranks.
"""

from weft.strategy.comparison.entry import compare
from weft.strategy.comparison.result import Comparison, OutputDifference, ParameterDifference, StepLoss

__all__ = ["Comparison", "OutputDifference", "ParameterDifference", "StepLoss", "compare"]
