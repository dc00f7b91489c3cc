"""Random argument sets for every public operator but those of WITHOUT_GROUP.

To add an operator, write a class and list it below. The point-to-point operators share messages.py instead, which draws
exchanges for each of them.
"""

from __future__ import annotations

from ops.fuzz import attention, dropout, experts, linears, messages, norms, pairs, vocabulary
from ops.fuzz.operator import Operator

OPERATORS: dict[str, Operator] = {
    operator.name: operator
    for operator in (
        linears.ColumnRowMLP(),
        linears.ColumnLinear(),
        linears.RowLinear(),
        linears.AllGatherLinear(),
        linears.LinearReduceScatter(),
        linears.ShardedLinear(),
        vocabulary.VocabParallelEmbedding(),
        vocabulary.VocabParallelCrossEntropy(),
        vocabulary.VocabParallelLinearCrossEntropy(),
        norms.RmsNorm(),
        norms.LayerNorm(),
        norms.AddRmsNorm(),
        norms.AddLayerNorm(),
        dropout.Dropout(),
        pairs.CopyToGroup(),
        pairs.ReduceFromGroup(),
        pairs.ScatterToGroup(),
        pairs.GatherFromGroup(),
        pairs.GatherFromSequence(),
        pairs.ReduceScatterToSequence(),
        pairs.AllToAll(),
        attention.RingAttention(),
        attention.UlyssesAttention(),
        experts.GroupedLinear(),
        experts.MoeDispatch(),
        experts.MoeCombine(),
    )
}

NAMES = (*OPERATORS, *messages.NAMES)
# Operators of one process, which change their arguments or convert formats: tests/ops/test_optimizer_draws.py draws
# their arguments and tests/ops/test_float_codes.py tests the conversions.
WITHOUT_GROUP = (
    "adam_step_",
    "momentum_step_",
    "split_float",
    "join_float",
    "quantize_blocks",
    "dequantize_blocks",
)
