"""Which collectives of the weft backend a call makes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from torch.profiler import ProfilerActivity, profile

Result = TypeVar("Result")


def collectives_of(run: Callable[[], Result], expected: dict[str, int]) -> Result:
    """What `run` gives, with no other collectives than `expected`, by c10d's names."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        result = run()
    names = (event.name for event in profiler.events())
    # The backend's events are weft:name, those of operators weft::name.
    made = Counter(name.removeprefix("weft:") for name in names if name.startswith("weft:") and "::" not in name)
    assert dict(made) == expected, f"{dict(made)} instead of {expected}"
    return result
