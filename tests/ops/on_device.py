"""Runs the bodies of this folder's tests on ranks with another device.

    test_mlp = on_device("cuda", test_sharded.test_column_row_mlp_matches_unsharded)

In a body, that device is torch's default device, and the default group has the backend `backend`. With gloo, the ranks
share a device; with NCCL, each rank has its own device, if there are enough. The device "cpu" tests this module without
a GPU.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support.ranks import run_on_ranks

NUM_RANKS = 2
SECONDS = 300  # compilation is slow


def on_device(
    device: str, test: Callable[..., None], num_ranks: int = NUM_RANKS, *, needs_gpu: str = "", backend: str = "gloo"
) -> Any:
    """Return a test with the body and the parameters of `test`; a body without `rank` runs on each rank.

    Args:
        needs_gpu: why the test needs a GPU, and not only the CUDA runtime.
        backend: backend of the default group; unless it is gloo, the test is marked `nccl`.
    """

    def device_test(**arguments: object) -> None:
        where = {"module": test.__module__, "name": test.__qualname__}
        run_on_ranks(num_ranks, run_body, timeout=SECONDS, **where, device=device, backend=backend, arguments=arguments)

    parameters = inspect.signature(test).parameters
    device_test.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [parameter for name, parameter in parameters.items() if name != "world_size"]
    )
    marks = [mark for mark in getattr(test, "pytestmark", []) if mark.args[:1] != ("world_size",)]
    device_test.num_ranks = num_ranks  # type: ignore[attr-defined]
    if device != "cpu":
        marks.append((pytest.mark.cuda if backend == "gloo" else pytest.mark.nccl).mark)
    if needs_gpu:
        marks.append(pytest.mark.gpu(needs_gpu).mark)
    device_test.pytestmark = marks  # type: ignore[attr-defined]
    return device_test


def run_body(
    rank: int, world_size: int, module: str, name: str, device: str, backend: str, arguments: dict[str, object]
) -> None:
    """Run the body of `on_device`'s test on one rank."""
    test = getattr(importlib.import_module(module), name)
    body = getattr(test, "rank_body", test)
    rank_arguments = {"rank": rank, "world_size": world_size}
    wanted = inspect.signature(body).parameters
    if backend != "gloo":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    with world_on(backend), torch.device(device):
        body(**arguments, **{name: value for name, value in rank_arguments.items() if name in wanted})


@contextmanager
def world_on(backend: str) -> Iterator[None]:
    """Replace the default group by one that has `backend`, while the body runs."""
    world, other = dist.group.WORLD, dist.new_group(backend=backend)
    dist.group.WORLD = other
    try:
        yield
    finally:
        dist.group.WORLD = world
    # Ranks are reused: otherwise hundreds of these groups would accumulate, with sockets and threads.
    dist.barrier(group=other)
    dist.destroy_process_group(other)
