"""The clock of a pipeline's trace on CUDA, with events of a simulated device, so that no test needs a GPU."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from support.ranks import on_ranks
from weft.strategy.pipeline import Pipeline
from weft.strategy.pipeline.staged_model import StagedModel
from weft.strategy.pipeline.step_clock import CudaClock, HostClock, StepTrace, clock_for

CUDA = torch.device("cuda")
TICK_SECONDS = 0.25


class Device:
    """A device that reaches the events recorded on its stream only while the host waits for one of them."""

    def __init__(self) -> None:
        self.queue: list[Event] = []
        self.num_waits = 0
        self._ticks = itertools.count(3)

    def run(self) -> None:
        for event in self.queue:
            event.seconds = next(self._ticks) * TICK_SECONDS
        self.queue.clear()


class Event:
    """Replaces torch.cuda.Event; consecutive events are TICK_SECONDS apart."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.has_timing = enable_timing
        self.seconds: float | None = None
        self._device: Device | None = None

    def record(self, stream: Device) -> None:
        self._device = stream
        stream.queue.append(self)

    def synchronize(self) -> None:
        assert self._device is not None
        self._device.num_waits += 1
        self._device.run()

    def elapsed_time(self, end: Event) -> float:
        assert self.has_timing and end.has_timing
        assert self.seconds is not None and end.seconds is not None, "read before the device reached the event"
        return (end.seconds - self.seconds) * 1e3


@contextmanager
def simulated_cuda() -> Iterator[Device]:
    device = Device()
    with (
        mock.patch.object(torch.cuda, "Event", Event),
        mock.patch.object(torch.cuda, "current_stream", lambda _: device),
    ):
        yield device


@on_ranks(1)
def test_a_trace_on_cuda_has_the_times_of_the_device(world_size: int) -> None:
    """The step itself does not wait for the device; the times are in the order of the schedule, one tick apart."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    pipeline = Pipeline(
        model, init_device_mesh("cpu", (world_size,)), ["1"], schedule="looped_bfs", num_micro_batches=3
    )
    with simulated_cuda() as device, mock.patch.object(StagedModel, "device", CUDA):
        pipeline.step(torch.ones(6, 4), lambda x: model(x).sum())
        assert device.num_waits == 0
        spans = pipeline.trace
        assert device.num_waits > 0
        actions = [action for action in pipeline.schedule(3).ranks[0] if action.computes]
        assert [span.action for span in spans] == actions
        times = [seconds for span in spans for seconds in (span.start, span.end)]
        # The first event is the clock's start.
        assert times == pytest.approx([TICK_SECONDS * (i + 1) for i in range(2 * len(actions))], rel=1e-12)
        num_waits = device.num_waits
        assert pipeline.trace == spans
        assert device.num_waits == num_waits


@on_ranks(1)
def test_a_trace_on_the_cpu_has_the_times_of_the_host(world_size: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    pipeline = Pipeline(
        model, init_device_mesh("cpu", (world_size,)), ["1"], schedule="looped_bfs", num_micro_batches=2
    )
    before, start = time.time(), time.perf_counter()
    pipeline.step(torch.ones(6, 4), lambda x: (time.sleep(0.01), model(x).sum())[1])
    after, seconds = time.time(), time.perf_counter() - start
    forwards = [span.end - span.start for span in pipeline.trace if str(span.action).startswith("1F")]
    assert all(0.01 <= duration <= seconds for duration in forwards)
    assert len(forwards) == 2
    assert all(0 <= a.start <= a.end <= b.start <= seconds for a, b in itertools.pairwise(pipeline.trace))
    assert before <= pipeline._runner.begun <= after


def test_begin_of_a_cuda_clock_is_a_time_of_the_host() -> None:
    with simulated_cuda() as device:
        clock = clock_for(CUDA)
        assert isinstance(clock, CudaClock)
        for _ in range(7):
            clock.mark()
        # begun() counts back from five events, 8 to 12 ticks after the start, and returns the earliest result.
        before = time.time()
        now = clock.begun() + 12 * TICK_SECONDS
        assert before <= now <= time.time()
        assert device.num_waits > 0


def test_begin_is_exact_if_the_process_loses_its_processor() -> None:
    """A delay between the readings of the two clocks does not shift this rank's times against those of other ranks."""
    delays = iter([0.0, 0.3, 0.2, 0.0, 0.5, 0.1])  # before each reading of time.time()
    now = 100.0

    def read_time() -> float:
        nonlocal now
        now += next(delays)
        return now

    with mock.patch.object(time, "perf_counter", lambda: now), mock.patch.object(time, "time", read_time):
        begun = read_time()
        clock = HostClock()
        now += 2.0
        assert clock.begun() == pytest.approx(begun, abs=1e-9)


def test_trace_without_step_is_empty() -> None:
    assert StepTrace(clock_for(torch.device("cpu"))).spans() == []
    assert isinstance(clock_for(torch.device("cpu")), HostClock)
