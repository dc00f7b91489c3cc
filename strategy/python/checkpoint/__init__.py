"""weft.strategy.checkpoint: directories of shards with checksums, written and read without pickle."""

from weft.strategy.checkpoint.directory import (
    Checkpoint,
    is_checkpoint,
    may_be_replaced,
    on_all_ranks,
    on_first_rank,
    open_checkpoint,
    save,
)
from weft.strategy.checkpoint.inspection import Contents, inspect, verify

__all__ = [
    "Checkpoint",
    "Contents",
    "inspect",
    "is_checkpoint",
    "may_be_replaced",
    "on_all_ranks",
    "on_first_rank",
    "open_checkpoint",
    "save",
    "verify",
]
