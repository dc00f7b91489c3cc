"""Finds the attributes that a module's forward reads, and checks later that their values are still the same.

A fused operator replaces the forward. It computes the same only while the attributes that the forward reads have the
values with which the two were compared.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from weft.strategy.sharding.state import original_class

_OF_EVERY_MODULE = frozenset((*dir(nn.Module), *nn.Module().__dict__))
_PLAIN = (bool, int, float, str, type(None), torch.dtype, types.FunctionType, types.BuiltinFunctionType)
_MISSING = "no value"


class Read(NamedTuple):
    """An attribute that a forward reads: the path of the module below the forward's own, and the name."""

    path: str
    name: str


class Watched(NamedTuple):
    """An attribute and its value: a plain value, or the class of a module."""

    path: str
    name: str
    value: Any


def reads_of(module: nn.Module, run: Callable[[], Any]) -> list[Read]:
    """Return the attributes of a module and the modules inside it that `run` reads, even missing ones.

    `module` must be a copy that is not used elsewhere: its classes change while `run` is called.
    """
    reads: dict[Read, None] = {}
    classes = {}
    for path, inner in module.named_modules():
        classes[inner] = type(inner)
        inner.__class__ = _recording_class(type(inner), path, reads)
    try:
        run()
    finally:
        for inner, cls in classes.items():
            inner.__class__ = cls
    return [read for read in reads if read.name not in _OF_EVERY_MODULE and not read.name.startswith("__")]


def _recording_class(cls: type[nn.Module], path: str, reads: dict[Read, None]) -> type[nn.Module]:
    def __getattribute__(self: nn.Module, name: str) -> Any:
        reads[Read(path, name)] = None
        return cls.__getattribute__(self, name)

    return type(cls.__name__, (cls,), {"__getattribute__": __getattribute__})


def why_not_watched(module: nn.Module, reads: list[Read]) -> str | None:
    """Return which of the reads is a tensor other than a parameter, whose values may change; None: none is."""
    for path, name in reads:
        inner = module.get_submodule(path)
        value = inner.__dict__.get(name)
        if name in inner._buffers:
            return f"its forward reads the buffer '{f'{path}.{name}' if path else name}', whose values may change"
        if isinstance(value, Tensor):
            return f"its forward reads the tensor '{f'{path}.{name}' if path else name}', whose values may change"
    return None


def watched(module: nn.Module, reads: list[Read]) -> tuple[Watched, ...]:
    """Return the values of the reads that can be compared later; objects with a state of their own cannot."""
    found = []
    for path, name in reads:
        inner = module.get_submodule(path)
        if name in inner._parameters or isinstance(inner._modules.get(name), nn.Linear):
            continue  # the layers of a fused MLP are checked by themselves
        value = _value_of(inner, name)
        if value is not None or getattr(inner, name, _MISSING) is None:
            found.append(Watched(path, name, value))
    return tuple(found)


def _value_of(module: nn.Module, name: str) -> Any:
    """Return a value to compare; None for an object that cannot be compared."""
    value = getattr(module, name, _MISSING)
    if isinstance(value, nn.Module):
        return original_class(value)
    return value if isinstance(value, _PLAIN) else None


def changes_in(module: nn.Module, attributes: tuple[Watched, ...]) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, value when watched, present value) of the attributes that have changed."""
    for path, name, before in attributes:
        inner = module if not path else module.get_submodule(path)
        now = _value_of(inner, name)
        if now is not before and now != before:
            yield f"{path}.{name}" if path else name, before, now
