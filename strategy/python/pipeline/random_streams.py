"""Random numbers of a step that runs on several ranks."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch


class RandomStreams:
    """Streams of random numbers for the micro-batches of a step: torch's, Python's and numpy's.

    Their seeds follow from one number, which each step draws from torch's CPU generator. Ranks with equal generators
    before the step have equal ones after it, whatever their stages draw. For one micro-batch all stages draw the same
    numbers before their own first layer, because several stages use the numbers that code before layers draws. From its
    first layer on, each stage has a separate stream.
    """

    def __init__(self) -> None:
        self._seed = 0

    @contextlib.contextmanager
    def of_step(self) -> Iterator[None]:
        """Enclose a step: afterwards, the generators have changed only by one number drawn from torch's for the CPU."""
        self._seed = int(torch.randint(1 << 62, ()))
        with preserving_all_random_states():
            yield

    def begin(self, micro_batch: int, stage: int = 0) -> None:
        """Begin a micro-batch's stream for a stage's layers; `stage` 0: for stage 0 and for all code before layers."""
        number = _mix_bits(self._seed + (stage << 32) + micro_batch)
        torch.default_generator.manual_seed(number)
        if _uses_cuda():
            torch.cuda.manual_seed(number)
        random.seed(number)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(number & 0xFFFFFFFF)


def _mix_bits(number: int) -> int:
    """Return 63 bits that each depend on all bits of the number: torch's CPU generator takes 32 of them for its seed.

    It is SplitMix64's output function (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
    """
    mask = (1 << 64) - 1
    number = (number * 0x9E3779B97F4A7C15) & mask
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & mask
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & mask
    return (number ^ (number >> 31)) >> 1


def preserving_random_state() -> contextlib.AbstractContextManager[None]:
    """Return a context manager that restores torch's CPU generator and that of the current CUDA device."""
    return torch.random.fork_rng(devices=[torch.cuda.current_device()] if _uses_cuda() else [])


@contextlib.contextmanager
def preserving_all_random_states() -> Iterator[None]:
    """Restore Python's and numpy's generators afterwards, and those of `preserving_random_state`."""
    state = random.getstate()
    numpy: Any = sys.modules.get("numpy")
    numpy_state = None if numpy is None else numpy.random.get_state()
    try:
        with preserving_random_state():
            yield
    finally:
        random.setstate(state)
        if numpy_state is not None:
            numpy.random.set_state(numpy_state)


def _uses_cuda() -> bool:
    return bool(torch.cuda.is_initialized())
