"""Counts the bytes that this process holds in tensors, exactly and by category.

    WEFT_MEMORY=1 python train.py           # or weft.memory.track() before the first tensor

    weft.memory.watch(model, optimizer)     # the Lightning and Fabric strategies call watch themselves
    ...
    weft.memory.peak(), weft.memory.by_category(at="peak")

CPU tensors are counted by an allocator that wraps torch's: the requested bytes, on all threads, including temporaries
inside operators. The shared memory of weft's process groups is counted, too. For a CUDA `device`, the sizes come from
the statistics of torch's caching allocator; there are no categories and no timeline.
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
