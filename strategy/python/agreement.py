"""Raises an error of one rank on all ranks, and gives each start of a job a name that all ranks know."""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist


def on_all_ranks(doing: str, call: Callable[[], Any]) -> Any:
    """Return what `call` returns on this rank, when it has returned on all; collective, but `call` must not be.

    Args:
        doing: what `call` does, as in "save the checkpoint 'x'".

    Raises:
        Exception: on a rank whose `call` has raised, that error; on others a RuntimeError with the text of the first.
    """
    error: Exception | None = None
    result = None
    try:
        result = call()
    except Exception as own:  # other ranks wait for this one
        error = own
    texts = [None if error is None else f"{type(error).__name__}: {error}"]
    if dist.is_initialized() and dist.get_world_size() > 1:
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, texts[0])
        texts = gathered
    if error is not None:
        raise error
    found = next(((rank, text) for rank, text in enumerate(texts) if text is not None), None)
    if found is not None:
        raise RuntimeError(f"rank {found[0]} failed to {doing} ({found[1]}); remove the cause, and try again.")
    return result


class _Start:
    """The name of this start of the job, and the default process group whose ranks have it."""

    name = ""
    group: Callable[[], Any] = staticmethod(lambda: None)


def name_start() -> str:
    """Return a name of this start of the job that all ranks have; collective at the first call in a default group.

    torchrun keeps the store of a job when it starts the job again, and with it the keys of the ranks before. The number
    of restarts in the environment is not the same on all hosts, so the first rank draws a name.
    """
    world = dist.group.WORLD
    if world is not None and _Start.group() is not world:
        names = [secrets.token_hex(8)]
        dist.broadcast_object_list(names, src=0)
        _Start.name, _Start.group = names[0], weakref.ref(world)
    return _Start.name


def start_name() -> str:
    """Return the name that `name_start` has drawn; "" before its first call. Not collective."""
    return _Start.name if _Start.group() is dist.group.WORLD else ""
