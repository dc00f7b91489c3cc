"""Validates the options of context parallelism, whose ranks compute different tokens of the same sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft._plugin.options import Options
    from weft.strategy.planning.layout import Sizes

ATTENTIONS = ("ring", "ulysses", "ring_ulysses")


def check_context(owner: str, options: Options, sizes: Sizes) -> None:
    """Raise ValueError for an unknown attention, and for options that context-parallel ranks do not support."""
    from weft.strategy import Plan

    if options.context_attention not in ATTENTIONS:
        raise ValueError(
            f"{owner} got context_attention={options.context_attention!r}; pass 'ring', 'ulysses' or 'ring_ulysses'."
        )
    if sizes.context_parallel == 1:
        return
    shards_sequence = isinstance(options.plan, Plan) and options.plan.sequence_parallel
    unsupported = {
        "sequence_parallel=True": options.sequence_parallel or shards_sequence,
    }
    for name, is_given in unsupported.items():
        if is_given:
            raise ValueError(
                f"{owner} got {sizes.context_parallel} context-parallel ranks and {name}, which are not supported "
                "together; leave one of them out."
            )
