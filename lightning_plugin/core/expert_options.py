"""Validates the options of expert parallelism, whose ranks have different tokens and different experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft._plugin.options import Options


def has_expert_ranks(options: Options) -> bool:
    """Return whether options ask for several expert-parallel ranks; False for a layout that is not valid."""
    from weft.strategy.planning.layout import Sizes

    if options.layout is None or options.chooses_layout:
        return options.expert_parallel_size != 1
    try:
        return Sizes.parse(options.layout).expert_parallel > 1
    except ValueError:  # which validation raises, with the name of the strategy
        return False
