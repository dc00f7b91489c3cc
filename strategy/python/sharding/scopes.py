"""Scopes: the forwards in which column layers may return shards, because row layers take them.

The plan verifies (except with verify="never") the code between column layers and their row layer only inside one
forward, that of the smallest module that contains them all. Other code (another method, a training step) may call the
same layers. In such calls column layers gather their output and row layers split their input, which is exact for any
code. Layers of explicit rules, and all layers with sequence parallelism, have no scope: in all calls, column layers
return shards and row layers take them.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch


class Scope:
    """Identifies the forward of one module; the column and row layers inside, and copies of them, refer to it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Scope:
        return self


class _Thread(threading.local):
    def __init__(self) -> None:
        self.active: list[Scope] = []


_THREAD = _Thread()


def is_outside(scope: Scope) -> bool:
    """Return whether neither the scope's forward nor a backward is running: a backward may recompute the forward.

    Code that torch.compile traces counts as inside.
    """
    if torch.compiler.is_compiling():  # first, because the other conditions would break the graph
        return False
    return scope not in _THREAD.active and torch._C._current_graph_task_id() == -1


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
    """Return a forward during which the `own_scope` of its module's state is active."""

    @functools.wraps(forward)
    def forward_in_scope(self: Any, *args: Any, **kwargs: Any) -> Any:
        return in_scope(self._weft_state.own_scope, forward, self, *args, **kwargs)

    return forward_in_scope
