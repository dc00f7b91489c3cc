"""Measures the temporary memory inside an operator: each distinct call runs once on zeros, under the real counter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_map

from weft import _memory
from weft.strategy.dry_run.leaves import leaves_of

# The most bytes that the tensors of a measured call may have.
MAX_BYTES = 1 << 30


class Temporaries:
    """The bytes that calls allocate and free again inside, by the shapes, strides and dtypes of their arguments."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._known: dict[Any, int | None] = {}

    def of(self, func: Any, args: Any, kwargs: Any) -> int | None:
        """Return the bytes of temporaries of a call whose tensors have no values; None: they are too large."""
        # The numbers of an in-place step, such as the row it begins at, are no sizes.
        has_sizes = bool(func._schema.returns)
        key = (func, _nested_key(args, has_sizes), _nested_key(kwargs, has_sizes))
        try:
            if key not in self._known:
                self._known[key] = self._measure(func, args, kwargs)
        except TypeError:  # an argument without a hash
            return 0
        return self._known[key]

    def _measure(self, func: Any, args: Any, kwargs: Any) -> int | None:
        num_bytes = sum(extent_of(tensor) * tensor.element_size() for tensor in _tensors((args, kwargs)))
        if num_bytes > self._max_bytes:
            return None
        with no_dispatch(), torch.no_grad():
            args, kwargs = tree_map(lambda leaf: zeros_like(leaf) if isinstance(leaf, Tensor) else leaf, (args, kwargs))
            inputs = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
            _memory.reset_peak()
            before = sum(_memory.current().values())
            try:
                result = func(*args, **kwargs)
            except (RuntimeError, NotImplementedError, IndexError, ValueError):
                return 0  # zeros are no valid argument of every operator
            rise = sum(_memory.peak().values()) - before
            made = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in _tensors(result)}
        return max(0, rise - sum(size for storage, size in made.items() if storage not in inputs))


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in leaves_of(values) if isinstance(leaf, Tensor)]


def _nested_key(value: Any, has_sizes: bool) -> Any:
    """Return `key_of` for each leaf of nested lists, tuples and dictionaries."""
    kind = type(value)
    if kind is tuple or kind is list:
        return kind, tuple([_nested_key(each, has_sizes) for each in value])
    if kind is dict:
        return tuple([(name, _nested_key(each, has_sizes)) for name, each in value.items()])
    return key_of(value, has_sizes)


def key_of(leaf: Any, has_sizes: bool) -> Any:
    """Return what temporaries may depend on: not the value of a float; that of an integer if `has_sizes`."""
    if not isinstance(leaf, Tensor):
        is_value = type(leaf) is float or (type(leaf) is int and not has_sizes)
        return type(leaf), None if is_value else leaf
    return leaf.shape, leaf.stride(), leaf.dtype


def extent_of(tensor: Tensor) -> int:
    """Return the number of elements from the first to the last of a tensor in its storage."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def zeros_like(tensor: Tensor) -> Tensor:
    """Return zeros in a new storage, with the strides of a tensor. Zero is a valid index into any dim."""
    return torch.zeros(extent_of(tensor), dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride())
