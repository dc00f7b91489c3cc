"""Context parallelism: models compute on a shard of the sequence, without changes of their code.

`parallelize_context` shards the tokens where a model's embeddings read them. From there on, values are
`ShardedSequence`, which read as full tensors; the rules in this package say how functions compute with their shards.
"""

from weft.strategy.context import attention, elementwise, losses, products, reductions, views  # noqa: F401  (the rules)
from weft.strategy.context.entry import carry_through_fsdp, parallelize_context, remove_context
from weft.strategy.context.sharded_sequence import ShardedSequence, full_sequences

__all__ = ["ShardedSequence", "carry_through_fsdp", "full_sequences", "parallelize_context", "remove_context"]
