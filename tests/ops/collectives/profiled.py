"""Checks which collectives a call makes, on the backend weft or gloo."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

Result = TypeVar("Result")

# Gloo's own events do not distinguish a reduce-scatter from the all-reduce that implements it; the dispatcher's
# operators do. The weft backend runs some collectives without these operators, so its own events are counted.
_NAMES = {
    "c10d::allreduce_": "all_reduce",
    "c10d::_allgather_base_": "all_gather_into_tensor",
    "c10d::_reduce_scatter_base_": "reduce_scatter_tensor",
    "c10d::alltoall_base_": "all_to_all_single",
    "c10d::broadcast_": "broadcast",
    "c10d::reduce_": "reduce",
    "c10d::send": "send",
    "c10d::recv_": "recv",
}


def collectives_of(run: Callable[[], Result], expected: dict[str, int]) -> Result:
    """Return the result of `run`; assert that its collectives, by c10d's names, are exactly `expected`.

    The groups that `run` uses must have the backend of the default group.
    """
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        result = run()
    names = (event.name for event in profiler.events())
    counts = Counter(_gloo_names(names) if dist.get_backend() == "gloo" else _weft_names(names))
    assert dict(counts) == expected, f"{dict(counts)} instead of {expected}"
    return result


def _weft_names(names: Iterator[str]) -> Iterator[str]:
    # The backend's events are named weft:name, and the events of operators weft::name.
    return (name.removeprefix("weft:") for name in names if name.startswith("weft:") and "::" not in name)


def _gloo_names(names: Iterator[str]) -> Iterator[str]:
    return (_NAMES.get(name, name) for name in names if name.startswith("c10d::"))
