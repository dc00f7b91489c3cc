"""weft.strategy.deferred: builds models without values by `deferred_init`, and materializes their shards later."""

from weft.strategy.deferred.context import deferred_init
from weft.strategy.deferred.materialize import (
    attributes_of,
    check_written,
    full_value_of,
    is_deferred,
    materialize,
    materialize_buffers,
    shard_of,
)

__all__ = [
    "attributes_of",
    "check_written",
    "deferred_init",
    "full_value_of",
    "is_deferred",
    "materialize",
    "materialize_buffers",
    "shard_of",
]
