"""The time of each rank's steps, in parts, and which ranks are slow.

In synchronous training all ranks take the same time for a step, because they wait for each other. The parts differ:

- waiting: blocked in communication, until the other ranks arrive and the data is moved;
- loading: from the end of a batch to the start of the next, except waiting and validation;
- computing: the rest.

Loading and computing together are the rank's *work*. The other ranks wait for the rank with the most work. Ranks of one
pipeline stage have equal work; stages may differ. The *excess* of a rank is its work minus the median work of the ranks
of its stage.

Where waiting is not measured, no part is known: Lightning waits for the other ranks before it fetches a batch, and a
callback on one rank may wait for the device.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class StepTimes:
    """One rank's mean times per step, in seconds.

    rank: the global rank.
    stage: the rank along the pipeline; 0 without one.
    step: of a step in total, without validation.
    waiting: nan if it is not measured; then `loading`, `computing` and `work` have no meaning.
    """

    rank: int
    stage: int
    step: float
    loading: float
    waiting: float

    @property
    def has_parts(self) -> bool:
        return not math.isnan(self.waiting)

    @property
    def computing(self) -> float:
        return self.step - self.loading - self.waiting

    @property
    def work(self) -> float:
        return self.step - self.waiting


def are_comparable(rows: list[StepTimes]) -> bool:
    """Return whether waiting is measured, and each stage has several ranks."""
    return rows[0].has_parts and len({row.stage for row in rows}) < len(rows)


def excesses(rows: list[StepTimes]) -> list[float]:
    """Return the excess of each row, in seconds; the median of an even number is the lower of the two in the middle."""
    works: dict[int, list[float]] = {}
    for row in rows:
        works.setdefault(row.stage, []).append(row.work)
    medians = {stage: statistics.median_low(values) for stage, values in works.items()}
    return [row.work - medians[row.stage] for row in rows]


def is_slow(row: StepTimes, excess: float, threshold: float) -> bool:
    """Return whether steps without the rank's excess would be more than `threshold` times as fast."""
    return excess > 0 and row.step > threshold * (row.step - excess)


class StepTimer:
    """Adds up the parts of this rank's steps.

    clock: returns the time in seconds.
    seconds_waited: returns the seconds that this thread has waited in communication.
    """

    def __init__(self, clock: Callable[[], float], seconds_waited: Callable[[], float]) -> None:
        self._clock = clock
        self._seconds_waited = seconds_waited
        self.restart()

    def restart(self) -> None:
        """Begin measuring, at the end of a batch."""
        self._now = self._waited_now = self._total = self._waited = self._loaded = 0.0
        self._now, self._waited_now = self._clock(), self._seconds_waited()

    def batch_begins(self) -> None:
        seconds, waited = self._elapse()
        self._loaded += seconds - waited

    def batch_ends(self) -> None:
        self._elapse()

    def pause(self) -> None:
        """Stop measuring, before a validation between two batches."""
        self.batch_begins()

    def resume(self) -> None:
        self._now, self._waited_now = self._clock(), self._seconds_waited()

    def means(self, num_steps: int) -> tuple[float, float, float]:
        """Return the means per step, in seconds: in total, loading, waiting."""
        return self._total / num_steps, self._loaded / num_steps, self._waited / num_steps

    def _elapse(self) -> tuple[float, float]:
        now, waited_now = self._clock(), self._seconds_waited()
        seconds, waited = now - self._now, waited_now - self._waited_now
        self._now, self._waited_now = now, waited_now
        self._total += seconds
        self._waited += waited
        return seconds, waited
