"""Signatures of modules: a result on one module holds for another of equal signature."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from weft.strategy.deferred import is_deferred
from weft.strategy.sharding.state import original_class

_INDEX_ATTRIBUTES = {
    *("layer_idx", "layer_id", "layer_index", "layer_number", "layer_num", "block_idx", "block_index", "idx", "index"),
}
_NO_CONFIGURATION = ("_parameters", "_buffers", "_modules", "training")


def signature(module: nn.Module, with_indices: bool = True) -> tuple[Any, ...]:
    """Return a key of a module and the modules inside it: classes, attributes, shapes and dtypes of tensors.

    Values of parameters and buffers, hooks and `training` do not count. Attributes count by value if they are plain or
    small, and by identity otherwise.

    `with_indices`: include attributes that number the module among others, such as `layer_idx`.
    """
    entries: list[Any] = []
    for name, inner in module.named_modules():
        attributes = tuple(
            (key, _plain(value))
            for key, value in sorted(inner.__dict__.items())
            if key not in _NO_CONFIGURATION and "hook" not in key and (with_indices or key not in _INDEX_ATTRIBUTES)
        )
        shapes = tuple(
            (key, None if value is None else (tuple(value.shape), value.dtype))
            for key, value in (*inner._parameters.items(), *inner._buffers.items())
        )
        entries.append((name, original_class(inner), attributes, shapes))
    return tuple(entries)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return value
    if isinstance(value, (tuple, list)) and len(value) <= 16:
        return tuple(_plain(item) for item in value)
    if isinstance(value, (set, frozenset)) and all(isinstance(item, str) for item in value):
        return tuple(sorted(value))
    if isinstance(value, dict) and len(value) <= 16:
        return tuple((_plain(key), _plain(item)) for key, item in value.items())
    if isinstance(value, FakeTensor):  # the stand-in of a parameter of another pipeline stage
        return value.dtype, tuple(value.shape)
    if isinstance(value, Tensor) and not is_deferred(value) and value.device.type == "cpu" and value.numel() <= 4096:
        return value.dtype, tuple(value.shape), tuple(value.detach().flatten().tolist())
    return id(value)


class Signatures:
    """The signatures of the modules of one model, each computed once."""

    def __init__(self) -> None:
        self._cached: dict[tuple[int, bool], int] = {}
        self._numbers: dict[tuple[Any, ...], int] = {}

    def of(self, module: nn.Module, with_indices: bool = True) -> int:
        """Return a number that is equal for modules of equal signatures."""
        key = (id(module), with_indices)
        if key not in self._cached:
            made = signature(module, with_indices)
            self._cached[key] = self._numbers.setdefault(made, len(self._numbers))
        return self._cached[key]


def argument_signature(args: Any, kwargs: Any) -> tuple[Any, ...]:
    """Return a key that is equal for calls that differ only in the values of tensors and of objects of equal types.

    Objects are all arguments other than tensors, None, numbers and strings, such as caches.
    """

    def of(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return tuple(leaf.shape), leaf.dtype, leaf.requires_grad
        return leaf if leaf is None or isinstance(leaf, (bool, int, float, str)) else type(leaf)

    leaves = (*tree_leaves(args), "", *sorted(kwargs), *tree_leaves(dict(kwargs)))
    return tuple(of(leaf) for leaf in leaves)
