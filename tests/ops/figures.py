"""What a call of an operator costs, measured: what its backward keeps, what it sends, how many bytes it takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import weft
from ops.memory.counting import Count, counted


@dataclass
class Figures:
    """Of one call: bytes, and collectives by c10d's names."""

    result: Tensor
    forward: dict[str, int]
    backward: dict[str, int]
    keeps: set[str]  # inputs that the backward needs
    saved: int  # bytes that were made for the backward
    forward_peak: int  # on top of the inputs
    backward_peak: int  # on top of what was there when it began


def _collectives(run: Callable[[], object]) -> dict[str, int]:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        run()
    names = (event.name for event in profiler.events())
    return dict(Counter(name.removeprefix("weft:") for name in names if name.startswith("weft:") and "::" not in name))


def _own(count: Count) -> int:
    """Peak without the shared memory of the collectives, which stays for the next call."""
    return count.peak() - count.peak("communication")


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def measure(call: Callable[..., Tensor], make: Callable[[], dict[str, object]]) -> Figures:
    """Calls `call` and its backward with new arguments from `make`, several times over."""
    arguments = make()
    result = call(**arguments)
    result.backward(torch.ones_like(result))  # the collectives get their memory

    results: list[Tensor] = []
    forward = _collectives(lambda: results.append(call(**arguments)))
    backward = _collectives(lambda: results[0].backward(torch.ones_like(result)))
    results.clear()

    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (saved.append(tensor), tensor)[1], lambda kept: kept):
        call(**arguments)
    names = {_address(value): name for name, value in arguments.items() if isinstance(value, Tensor)}
    made = {_address(tensor): tensor.untyped_storage().nbytes() for tensor in saved if _address(tensor) not in names}
    keeps = {names[_address(tensor)] for tensor in saved if _address(tensor) in names}
    saved.clear()

    arguments = make()
    with counted() as count:
        result = call(**arguments)
        forward_peak = _own(count)
        grad = torch.ones_like(result)
        before = count.now() - count.now("communication")
        weft.memory.reset_peak()
        result.backward(grad)
        backward_peak = _own(count) - before
    return Figures(result.detach(), forward, backward, keeps, sum(made.values()), forward_peak, backward_peak)
