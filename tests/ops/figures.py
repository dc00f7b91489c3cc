"""Measures the cost of an operator call: tensors saved for the backward, collectives, and bytes.

A pipeline message has a cost on two ranks: see `measure_message`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import weft
from ops.memory.counting import Count, counted


@dataclass
class Figures:
    """The figures of one call: bytes, and collectives by c10d's names."""

    results: tuple[Tensor, ...]
    forward: dict[str, int]
    backward: dict[str, int]
    keeps: set[str]  # inputs and results that are saved for the backward
    saved: int  # bytes of other tensors saved for the backward
    forward_peak: int  # bytes, without the inputs
    backward_peak: int  # bytes, without those that were allocated before the backward


def _collectives(run: Callable[[], object]) -> dict[str, int]:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        run()
    names = (event.name for event in profiler.events())
    return dict(Counter(name.removeprefix("weft:") for name in names if name.startswith("weft:") and "::" not in name))


def _peak_without_communication(count: Count) -> int:
    """Return the peak in bytes without the collectives' shared memory, which later calls reuse."""
    return count.peak() - count.peak("communication")


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _named(results: tuple[Tensor, ...]) -> dict[str, Tensor]:
    return dict(zip(("y", "sum"), results, strict=False))


def measure(call: Callable[..., Tensor | tuple[Tensor, ...]], make: Callable[[], dict[str, object]]) -> Figures:
    """Run `call` and its backward several times, on arguments from `make`, and return the figures."""

    def run(arguments: dict[str, object]) -> tuple[Tensor, ...]:
        results = call(**arguments)
        return results if isinstance(results, tuple) else (results,)

    def backward_of(results: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> None:
        torch.autograd.backward([result for result in results if result.requires_grad], grads)

    arguments = make()
    results = run(arguments)
    grads = tuple(torch.ones_like(result) for result in results if result.requires_grad)
    backward_of(results, grads)  # warm up: the collectives allocate their shared memory

    retained: list[tuple[Tensor, ...]] = []
    forward = _collectives(lambda: retained.append(run(arguments)))
    backward = _collectives(lambda: backward_of(retained[0], grads))
    retained.clear()

    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: (saved.append(tensor), tensor)[1], lambda retained: retained
    ):
        results = run(arguments)
    known = {**arguments, **_named(results)}
    names = {_address(value): name for name, value in known.items() if isinstance(value, Tensor)}
    new_storages = {
        _address(tensor): tensor.untyped_storage().nbytes() for tensor in saved if _address(tensor) not in names
    }
    keeps = {names[_address(tensor)] for tensor in saved if _address(tensor) in names}
    saved.clear()
    del results, known

    arguments = make()
    with counted() as count:
        results = run(arguments)
        forward_peak = _peak_without_communication(count)
        before = count.now() - count.now("communication")
        weft.memory.reset_peak()
        backward_of(results, grads)
        backward_peak = _peak_without_communication(count) - before
    shapes = tuple(result.detach() for result in results)
    return Figures(shapes, forward, backward, keeps, sum(new_storages.values()), forward_peak, backward_peak)


def measure_message(x: Tensor, rank: int, group: str) -> tuple[Figures, dict[str, int]]:
    """Return figures of a message from rank 0 to rank 1, with its gradients sent back, and the messages by name.

    NOTE: a profile omits messages that are in flight at its end, so the messages of forward and backward can only be
    counted together.
    """
    needs_grad = x.requires_grad
    grad = torch.ones_like(x)

    def forward() -> list[Tensor]:
        """Send or receive; return the token on rank 0, and the received tensor on rank 1."""
        if rank == 0:
            token = weft.ops.pipeline_send([x], 1, 0, group)
            weft.ops.pipeline_wait(token)
            return [token]
        return weft.ops.pipeline_wait(weft.ops.pipeline_recv([x], 0, 0, group))

    def backward(results: list[Tensor]) -> None:
        if needs_grad:
            results[0].backward(results[0].detach() if rank == 0 else grad)
        weft.ops.pipeline_flush(group)

    backward(forward())
    messages = _collectives(lambda: backward(forward()))
    x.grad = None
    with counted() as count:
        results = forward()
        forward_peak = _peak_without_communication(count)
        before = count.now() - count.now("communication")
        saved = before - (results[0].nbytes if rank else 0)
        weft.memory.reset_peak()
        backward(results)
        backward_peak = _peak_without_communication(count) - before
    dist.barrier()
    return Figures((results[0].detach(),), {}, {}, set(), saved, forward_peak, backward_peak), messages
