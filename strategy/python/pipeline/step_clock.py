"""Times the computations of one rank's step: by the host's clock on the CPU, by events on the stream on CUDA.

On CUDA, an operator's call returns before the device has computed it, so that the host's clock gives launch times. An
event has the time at which the device reaches it, and is read after the step, so the step itself does not wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from weft.strategy._plan import Action, Span


class StepClock(Protocol):
    """A clock that starts when it is created.

    mark: returns a mark of this moment in the order of the device's work.
    seconds: returns the time of a mark, in seconds from the start; may wait for the device.
    begun: returns the start as `time.time()`; may wait for the device.
    """

    def mark(self) -> Any: ...
    def seconds(self, mark: Any) -> float: ...
    def begun(self) -> float: ...


class HostClock:
    """Reads the host's clock; its marks are seconds."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def mark(self) -> float:
        return time.perf_counter() - self._start

    def seconds(self, mark: float) -> float:
        return mark

    def begun(self) -> float:
        return _earliest_begin(self.mark)


class CudaClock:
    """Records events on a CUDA device's current stream; its marks are these events."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = self.mark()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, mark: torch.cuda.Event) -> float:
        mark.synchronize()
        milliseconds: float = self._start.elapsed_time(mark)
        return milliseconds / 1e3

    def begun(self) -> float:
        # Events have no time of the host: wait for one, and count back from there.
        return _earliest_begin(lambda: self.seconds(self.mark()))


def _earliest_begin(seconds_since_start: Callable[[], float]) -> float:
    """Return a clock's start as `time.time()`: the present time minus the seconds since the start.

    If the process loses its processor between the two readings, the result is too late, so the earliest of a few
    counts.
    """

    def count_back() -> float:
        seconds = seconds_since_start()
        return time.time() - seconds

    return min(count_back() for _ in range(5))


def clock_for(device: torch.device) -> StepClock:
    """Return a started clock for computations on `device`."""
    return CudaClock(device) if device.type == "cuda" else HostClock()


class StepTrace:
    """The computations of one step with their marks."""

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock
        self._rows: list[tuple[Action, Any, Any]] = []
        self._spans: list[Span] | None = None
        self.mark = clock.mark
        self.begun = clock.begun

    def add(self, action: Action, start: Any) -> None:
        """Add a computation that began at the mark `start` and ends now."""
        self._rows.append((action, start, self._clock.mark()))

    def spans(self) -> list[Span]:
        """Return the computations, in seconds from the clock's start. Call it after the step; may wait on CUDA."""
        if self._spans is None:
            seconds = self._clock.seconds
            self._spans = [Span(action, seconds(start), seconds(end)) for action, start, end in self._rows]
            self._rows = []  # frees the events
        return self._spans
