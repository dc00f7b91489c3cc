"""Many random calls of one operator on the ranks of one launch."""

from __future__ import annotations

from collections import Counter

import torch.distributed as dist

from ops.fuzz import OPERATORS
from ops.fuzz.check import check
from ops.fuzz.check_messages import check_exchange
from ops.fuzz.messages import draw_exchange
from ops.fuzz.operator import draw_call


def run_calls(rank: int, world_size: int, operator: str, first_seed: int, count: int) -> dict[str, int]:
    """How many calls agreed and how many were refused, as they should; the same on every rank."""
    alone = [dist.new_group([each], backend="cpu:weft") for each in range(world_size)][rank]
    last_two = dist.new_group([world_size - 2, world_size - 1], backend="cpu:weft")
    groups = {
        "world": dist.group.WORLD.group_name,
        "second": dist.new_group(backend="cpu:weft").group_name,
        "alone": alone.group_name,
        "last two": last_two.group_name if rank >= world_size - 2 else "",
        "gloo": dist.new_group(backend="gloo").group_name,
        "": "",
    }
    outcomes: Counter[str] = Counter()
    for seed in range(first_seed, first_seed + count):
        if operator in OPERATORS:
            outcome = check(draw_call(OPERATORS[operator], seed, world_size), rank, groups)
        else:
            outcome = check_exchange(draw_exchange(operator, seed, world_size), rank, groups)
        outcomes[outcome] += 1
    return dict(outcomes)
