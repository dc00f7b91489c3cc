"""Scopes: the forwards in which a column layer may return a shard, because a row layer takes it.

The plan has verified the code between the layers of a group in one forward, that of the smallest module that contains
the group. Other code (another method, a training step) may call the same layers. There, column layers gather their
output and row layers split their input, which is exact for any code.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch


class Scope:
    """The forward of one module; its layers and copies of them refer to the same object."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Scope:
        return self


class _Thread(threading.local):
    def __init__(self) -> None:
        self.active: list[Scope] = []


_THREAD = _Thread()


def is_outside(scope: Scope) -> bool:
    """Return whether neither the scope's forward is running nor a backward, which may recompute a part of it.

    Code that a compiler traces counts as inside.
    """
    return scope not in _THREAD.active and torch._C._current_graph_task_id() == -1 and not torch.compiler.is_compiling()


def in_scope(scope: Scope, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function inside a scope."""
    if torch.compiler.is_compiling():
        return function(*args, **kwargs)
    _THREAD.active.append(scope)
    try:
        return function(*args, **kwargs)
    finally:
        _THREAD.active.pop()


def with_scope(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward that is the scope of its module's state."""

    @functools.wraps(forward)
    def forward_in_scope(self: Any, *args: Any, **kwargs: Any) -> Any:
        return in_scope(self._weft_state.own_scope, forward, self, *args, **kwargs)

    return forward_in_scope
