"""Keeps the key-value caches among a module's arguments as they were, for a forward that runs again in the backward.

A forward adds its keys and values to a cache of Transformers, whose models make one for each call unless their config
says use_cache=False. A second forward must find the cache without them.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any


def caches_in_first_state(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[Any, Any], tuple[Any, Any]] | None:
    """Return a function that takes these arguments, and returns them with the caches in their current state.

    Its first call returns the caches themselves, and later calls return copies. None: there is no cache of Transformers
    among the arguments. Tensors of caches are not copied: an update makes new ones, or writes the same values again.
    """
    module = sys.modules.get("transformers.cache_utils")
    found = [] if module is None else [each for each in (*args, *kwargs.values()) if isinstance(each, module.Cache)]
    if not found:
        return None
    saved = {id(cache): _copy(cache) for cache in found}

    num_calls = 0

    def restore(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1:
            return args, kwargs

        def restored(value: Any) -> Any:
            return _copy(saved[id(value)]) if id(value) in saved else value

        return tuple(map(restored, args)), {name: restored(value) for name, value in kwargs.items()}

    return restore


def _copy(cache: Any) -> Any:
    """Return a copy of a cache, with copies of its layers or of the caches inside it; it has the same tensors."""
    result = copy.copy(cache)
    for name, value in vars(cache).items():
        if isinstance(value, list):
            setattr(result, name, [copy.copy(each) for each in value])
        elif isinstance(value, dict):
            setattr(result, name, dict(value))
        elif name.endswith("_cache"):
            setattr(result, name, _copy(value))
    return result
