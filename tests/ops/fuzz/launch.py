"""Many random calls of one operator on the ranks of one launch."""

from __future__ import annotations

from collections import Counter

import torch.distributed as dist

from ops.fuzz import OPERATORS
from ops.fuzz.check import check
from ops.fuzz.operator import draw_call


def run_calls(rank: int, world_size: int, operator: str, first_seed: int, count: int) -> dict[str, int]:
    """How many calls agreed and how many were refused, as they should; the same on every rank."""
    groups = {
        "world": dist.group.WORLD.group_name,
        "second": dist.new_group(backend="cpu:weft").group_name,
        "alone": [dist.new_group([each], backend="cpu:weft") for each in range(world_size)][rank].group_name,
        "": "",
    }
    outcomes: Counter[str] = Counter()
    for seed in range(first_seed, first_seed + count):
        outcomes[check(draw_call(OPERATORS[operator], seed, world_size), rank, groups)] += 1
    return dict(outcomes)
