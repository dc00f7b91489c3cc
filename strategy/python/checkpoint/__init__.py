"""weft.strategy.checkpoint: directories of shards with checksums, written and read without pickle."""

from weft.strategy.checkpoint.directory import (
    Checkpoint,
    begin,
    check_ranks,
    is_checkpoint,
    may_be_replaced,
    on_all_ranks,
    on_first_rank,
    open_checkpoint,
    publish,
    save,
)
from weft.strategy.checkpoint.inspection import Contents, inspect, verify
from weft.strategy.checkpoint.locations import Location, Where, joined, location_of

__all__ = [
    "Checkpoint",
    "Contents",
    "Location",
    "Where",
    "begin",
    "check_ranks",
    "inspect",
    "is_checkpoint",
    "joined",
    "location_of",
    "may_be_replaced",
    "on_all_ranks",
    "on_first_rank",
    "open_checkpoint",
    "publish",
    "save",
    "verify",
]
