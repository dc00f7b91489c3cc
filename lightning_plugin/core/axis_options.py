"""Says which axes of the mesh options ask for, before the number of devices is known."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft._plugin.options import Options


def has_ranks(options: Options, axis: str) -> bool:
    """Return whether options ask for several ranks of "context_parallel" or "expert_parallel".

    False for a layout that is not valid: validation raises its error, with the name of the strategy.
    """
    from weft.strategy.planning.layout import Sizes

    if options.layout is None or options.chooses_layout:
        return bool(getattr(options, f"{axis}_size") != 1)
    try:
        return bool(getattr(Sizes.parse(options.layout), axis) > 1)
    except ValueError:
        return False
