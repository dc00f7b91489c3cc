"""Random argument sets for every public operator. An operator is added by a class of its own and its name below;
messages between ranks are drawn together, for each of their operators.
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
