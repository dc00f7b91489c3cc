"""The modes under which a pipeline computes without values."""

from __future__ import annotations

import functools
from typing import Any, TypeGuard

from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from weft.strategy.context.sharded_sequence import shard_of


class FakeMode(FakeTensorMode):
    """A FakeTensorMode that also takes real tensors, and asks only once whether there is a CUDA device.

    FakeTensorMode asks it for each operator. The answer takes 40 microseconds where Lightning has been imported, which
    makes torch ask NVML each time: a third of the time of a recording.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    @functools.cached_property
    def avoid_device_init(self) -> bool:
        """Whether the mode must not initialise a device."""
        return super().avoid_device_init


class DryRunMode(FakeMode):
    """The mode of a dry run, whose tensors stand for those of a training: a pipeline computes with them."""


def is_recorded(value: Any) -> TypeGuard[FakeTensor]:
    """Return whether a value is a fake tensor of a recording: it has a shape, and another stage has its values.

    So is a sequence that context parallelism shards, if its shard is one.
    """
    value = shard_of(value)
    return isinstance(value, FakeTensor) and not isinstance(value.fake_mode, DryRunMode)
