"""Random argument sets for every public operator.

To add an operator, write a class and list it below. The point-to-point operators share messages.py instead, which draws
exchanges for each of them.
"""

from __future__ import annotations

from ops.fuzz import dropout, linears, messages, norms, pairs, vocabulary
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
    )
}

NAMES = (*OPERATORS, *messages.NAMES)
