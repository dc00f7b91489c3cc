"""Runs many random calls of one operator on the ranks of one launch."""

from __future__ import annotations

from collections import Counter

import torch.distributed as dist

from ops.fuzz import OPERATORS
from ops.fuzz.check import check
from ops.fuzz.check_messages import check_exchange
from ops.fuzz.messages import draw_exchange
from ops.fuzz.operator import draw_call


def run_calls(
    rank: int,
    world_size: int,
    operator: str,
    first_seed: int,
    count: int,
    device: str = "cpu",
    backend: str = "cpu:weft",
) -> dict[str, int]:
    """Return the number of calls by outcome, the same on every rank.

    Tensors that may be on any device are on `device`. All groups but "gloo" have the backend `backend`, which must be
    gloo unless `device` is the CPU.
    """
    only_gloo = backend == "gloo"
    alone = [dist.new_group([each], backend=backend) for each in range(world_size)][rank]
    last_two = dist.new_group([world_size - 2, world_size - 1], backend=backend)
    groups = {
        "world": (dist.new_group(backend=backend) if only_gloo else dist.group.WORLD).group_name,
        "second": dist.new_group(backend=backend).group_name,
        "alone": alone.group_name,
        "last two": last_two.group_name if rank >= world_size - 2 else "",
        "gloo": dist.new_group(backend="gloo").group_name,
        "": "",
    }
    outcomes: Counter[str] = Counter()
    for seed in range(first_seed, first_seed + count):
        try:
            if operator in OPERATORS:
                outcome = check(draw_call(OPERATORS[operator], seed, world_size), rank, groups, device)
            else:
                outcome = check_exchange(draw_exchange(operator, seed, world_size, only_gloo), rank, groups, device)
        except AssertionError as error:
            raise AssertionError(f"with --device {device} --backend {backend}: {error}") from error
        outcomes[outcome] += 1
    return dict(outcomes)
