"""Random numbers of a step whose parts run on several ranks."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator

import torch


class RandomStreams:
    """A stream of random numbers for each micro-batch of a step: torch's, Python's and numpy's.

    Its seed is drawn from torch's stream outside.

    Ranks that drew alike before the step do so after it, whatever their stages draw. For one micro-batch all stages
    draw the same up to their first layer, as what a step or the code before layers draws is used on several stages;
    from there each has a stream of its own.
    """

    def __init__(self) -> None:
        self._seed = 0

    @contextlib.contextmanager
    def of_step(self) -> Iterator[None]:
        """A step; afterwards the generators are as they were, but for one number."""
        self._seed = int(torch.randint(1 << 62, ()))
        with keeping_all_random_states():
            yield

    def begin(self, micro_batch: int, stage: int = 0) -> None:
        """Go on with a micro-batch's stream; `stage`: 0 for that before the layers, and that of stage 0."""
        number = _mixed(self._seed + (stage << 32) + micro_batch)
        torch.default_generator.manual_seed(number)
        if _uses_cuda():
            torch.cuda.manual_seed(number)
        random.seed(number)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(number & 0xFFFFFFFF)


def _mixed(number: int) -> int:
    """63 bits, each of which depends on all: torch's CPU generator takes 32 of them for its seed.

    The output function of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
    """
    mask = (1 << 64) - 1
    number = (number * 0x9E3779B97F4A7C15) & mask
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & mask
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & mask
    return (number ^ (number >> 31)) >> 1


def keeping_random_state() -> contextlib.AbstractContextManager[None]:
    """Inside, what is drawn at random changes no generator, of the CPU's and the current device's."""
    return torch.random.fork_rng(devices=[torch.cuda.current_device()] if _uses_cuda() else [])


@contextlib.contextmanager
def keeping_all_random_states() -> Iterator[None]:
    """Also keep the states of Python's and numpy's generators."""
    state, numpy = random.getstate(), sys.modules.get("numpy")
    of_numpy = None if numpy is None else numpy.random.get_state()
    try:
        with keeping_random_state():
            yield
    finally:
        random.setstate(state)
        if of_numpy is not None:
            numpy.random.set_state(of_numpy)


def _uses_cuda() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()
