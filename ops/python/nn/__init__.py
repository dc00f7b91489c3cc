"""Scriptable modules over weft's operators. Their parameters are plain tensors: this rank's shards, or replicas.

The modules run in eager mode, under torch.jit.script (save, load in a fresh process, C++), torch.compile and
torch.export. Group names differ from job to job: `rebind_group` gives a loaded module the group name of this job.
"""

from weft.nn.attention import ParallelAttention
from weft.nn.dropout import Dropout
from weft.nn.embedding import VocabParallelEmbedding
from weft.nn.gate_up import join_gate_up
from weft.nn.heads import kv_groups, shard_qkv
from weft.nn.linear import AllGatherLinear, ColumnLinear, LinearReduceScatter, RowLinear, ShardedLinear
from weft.nn.loss import VocabParallelCrossEntropy, VocabParallelLinearCrossEntropy
from weft.nn.mlp import ColumnRowMLP
from weft.nn.norm import LayerNorm, RMSNorm
from weft.nn.rebind import rebind_group
from weft.nn.shard import shard_range

__all__ = [
    "AllGatherLinear",
    "ColumnLinear",
    "ColumnRowMLP",
    "Dropout",
    "LayerNorm",
    "LinearReduceScatter",
    "ParallelAttention",
    "RMSNorm",
    "RowLinear",
    "ShardedLinear",
    "VocabParallelCrossEntropy",
    "VocabParallelEmbedding",
    "VocabParallelLinearCrossEntropy",
    "join_gate_up",
    "kv_groups",
    "rebind_group",
    "shard_qkv",
    "shard_range",
]
