"""Searches in which the optimizer's states may be in CPU memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from weft.strategy.tuning.formats import front_of
from weft.strategy.tuning.result import Tuning

NONE, CPU = "none", "cpu"


def offload_if_nothing_fits(search: Callable[[tuple[str, ...]], Tuning]) -> Tuning:
    """Return the result of a search without offloaded states or, if no layout fits, with them.

    Args:
        search: called with the values of `offload` that are tried.
    """
    found = dataclasses.replace(search((NONE,)), offload=(NONE, CPU))
    if found.layouts:
        return found
    try:
        offloaded = search((CPU,))
    except ValueError:  # CPU ranks, an optimizer without states, or too little CPU memory
        return found
    smallest = [each for each in (found.smallest, offloaded.smallest) if each is not None]
    return dataclasses.replace(
        found,
        layouts=offloaded.layouts,
        smallest=None if offloaded.layouts else min(smallest, key=lambda each: each.peak_bytes),
        num_candidates=found.num_candidates + offloaded.num_candidates,
        num_above_limit=found.num_above_limit + offloaded.num_above_limit,
        front=front_of((*found.front, *offloaded.front)),
        needs_offload=bool(offloaded.layouts),
    )
