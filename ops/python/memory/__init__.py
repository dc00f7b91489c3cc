"""The memory of this process, counted to the byte and by what it is for.

    WEFT_MEMORY=1 python train.py           # or weft.memory.track() before the first tensor

    weft.memory.watch(model, optimizer)     # the strategies do so themselves
    ...
    weft.memory.peak(), weft.memory.by_category(at="peak")

CPU tensors are counted by an allocator around torch's: the bytes that were asked for, on all threads, temporaries
inside operators included. A CUDA `device` is answered from the statistics of torch's caching allocator.
"""

from __future__ import annotations

from weft.memory.counter import (
    CATEGORIES,
    Phase,
    begin_phase,
    by_category,
    current,
    is_tracking,
    num_allocations,
    peak,
    peak_reserved,
    reserved,
    reset_peak,
    tag,
    timeline,
    track,
)
from weft.memory.watch import Watch, tag_parameters, watch

__all__ = [
    "CATEGORIES",
    "Phase",
    "Watch",
    "begin_phase",
    "by_category",
    "current",
    "is_tracking",
    "num_allocations",
    "peak",
    "peak_reserved",
    "reserved",
    "reset_peak",
    "tag",
    "tag_parameters",
    "timeline",
    "track",
    "watch",
]
