"""Finds the attributes that a module's forward reads, and checks later that their values are still the same.

A fused operator replaces the forward. It computes the same as the forward only while the attributes that the forward
reads have the values that they had when operator and forward were compared.
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
    """An attribute that a forward reads.

    path: the name of the module that has the attribute, relative to the module whose forward runs.
    name: the name of the attribute.
    """

    path: str
    name: str


class Watched(NamedTuple):
    """An attribute and its value, as `_comparable` returns it."""

    path: str
    name: str
    value: Any


def reads_of(module: nn.Module, run: Callable[[], Any]) -> list[Read]:
    """Return the attributes of a module and the modules inside it that `run` reads, even missing ones.

    Attributes that every nn.Module has are left out. `module` must be a copy that is not used elsewhere: it and the
    modules inside it have other classes while `run` is called.
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
    """Return why the attributes cannot be watched: one is a buffer or a plain tensor; None if all can."""
    for path, name in reads:
        inner = module.get_submodule(path)
        value = inner.__dict__.get(name)
        if name in inner._buffers:
            return f"its forward reads the buffer '{f'{path}.{name}' if path else name}', whose values may change"
        if isinstance(value, Tensor):
            return f"its forward reads the tensor '{f'{path}.{name}' if path else name}', whose values may change"
    return None


def watch(module: nn.Module, reads: list[Read]) -> tuple[Watched, ...]:
    """Return the attributes and their present values.

    Parameters, which may change, and nn.Linear layers, whose classes a fused MLP checks, are left out.
    """
    found = []
    for path, name in reads:
        inner = module.get_submodule(path)
        if name not in inner._parameters and not isinstance(inner._modules.get(name), nn.Linear):
            found.append(Watched(path, name, _comparable(getattr(inner, name, _MISSING))))
    return tuple(found)


def _comparable(value: Any) -> Any:
    """Return a plain value itself, a list, tuple or dict with each item converted likewise, else the object's class.

    The results for an attribute of a model and for that of its deep copy are equal.
    """
    if isinstance(value, _PLAIN):
        return value
    if type(value) in (list, tuple):
        return type(value)(map(_comparable, value))
    if type(value) is dict:
        return {key: _comparable(item) for key, item in value.items()}
    return original_class(value) if isinstance(value, nn.Module) else type(value)


def changes_in(module: nn.Module, attributes: tuple[Watched, ...]) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, value when watched, present value) of the attributes that have changed."""
    for path, name, before in attributes:
        inner = module if not path else module.get_submodule(path)
        now = _comparable(getattr(inner, name, _MISSING))
        if now is not before and now != before:
            yield f"{path}.{name}" if path else name, before, now
