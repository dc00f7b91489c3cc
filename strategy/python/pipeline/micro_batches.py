"""Splits a batch into micro-batches."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from weft.strategy._plan import deal_samples


def batch_size_of(batch: Any) -> int:
    """Return the number of samples: the most frequent size along dim 0 of the tensors of a batch.

    Raises:
        ValueError: no tensor has a dim, or several sizes are equally frequent.
    """
    sizes = collections.Counter(tensor.shape[0] for tensor in _tensors(batch) if tensor.dim() > 0)
    if not sizes:
        raise ValueError(
            "the batch has no tensor with a dim to split into micro-batches; pass split=, which splits a batch, and "
            "weight=, a micro-batch's weight in the loss (a Trainer's strategy: split_batch= and micro_batch_weight=)."
        )
    (size, count), *others = sizes.most_common()
    if others and others[0][1] == count:
        raise ValueError(
            f"the batch's tensors have the sizes {sorted(sizes)} along dim 0, equally often, so the number of samples "
            "is ambiguous; pass split=, which splits a batch, and weight=, a micro-batch's weight in the loss (a "
            "Trainer's strategy: split_batch= and micro_batch_weight=)."
        )
    return size


def split_batch(batch: Any, num_micro_batches: int, shares: Sequence[float] | None = None) -> list[Any]:
    """Split every tensor that has the batch's size along dim 0; other values are in every micro-batch.

    Dicts and other mappings (BatchEncoding, too), lists, tuples, named tuples and dataclasses keep their types. Lists
    and tuples without tensors, with one item per sample (names, texts, dataclasses), are split as well. The tensors of
    micro-batches are views. The sizes are in proportion to `shares`; without shares they are as even as possible,
    larger ones first.

    Raises:
        ValueError: see `batch_size_of`; fewer samples than micro-batches.
    """
    size = batch_size_of(batch)
    if size < num_micro_batches:
        raise ValueError(
            f"got {num_micro_batches} micro-batches for a batch of {size} samples; pass num_micro_batches of at most "
            f"{size}."
        )
    sizes = deal_samples(size, shares or [1.0] * num_micro_batches)
    bounds = list(itertools.accumulate(sizes, initial=0))

    def samples_of(i: int, value: Any) -> Any:
        return value[bounds[i] : bounds[i + 1]] if _has_samples(value, size) else value

    return [_map(functools.partial(samples_of, i), batch) for i in range(num_micro_batches)]


def first_samples(batch: Any, num_samples: int) -> Any:
    """Return a batch with only its first samples, found in the tensors and lists that `split_batch` splits."""
    size = batch_size_of(batch)
    return _map(lambda value: value[:num_samples] if _has_samples(value, size) else value, batch)


def _has_samples(value: Any, size: int) -> bool:
    if isinstance(value, Tensor):
        return value.dim() > 0 and value.shape[0] == size
    return len(value) == size


def map_tensors(function: Callable[[Tensor], Any], batch: Any) -> Any:
    """Return a batch in which `function` replaces each tensor, inside the collections that `split_batch` supports."""
    return _map(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, batch)


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def collect(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            found.append(leaf)
        return leaf

    _map(collect, value)
    return found


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    """Return a copy of a batch in which `function` replaces each tensor, and each list or tuple without tensors."""
    if isinstance(value, Tensor):
        return function(value)
    if type(value) in (list, tuple) and value and not any(isinstance(v, Tensor) for v in pytree.tree_leaves(value)):
        return function(value)
    if isinstance(value, Mapping):
        items = {key: _map(function, item) for key, item in value.items()}
        if isinstance(value, collections.defaultdict):
            return collections.defaultdict(value.default_factory, items)
        cls: Any = type(value)
        return items if cls is dict else cls(items)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map(function, item) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_map(function, item) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        result = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(result, field.name, _map(function, getattr(value, field.name)))
        return result
    return value


def signature(value: Any, *, with_contents: bool = True) -> Any:
    """Return a hashable key of arguments without the values of tensors, equal if calls take the same path in a forward.

    `with_contents`: include the values of numbers and strings. False is for a batch: its numbers affect the forward
    only as arguments of the model's call, which has a signature of its own.
    """
    if isinstance(value, Tensor):
        return ("tensor", tuple(value.shape), value.dtype, value.device.type, value.requires_grad)
    if isinstance(value, Mapping):
        items = ((key, signature(item, with_contents=with_contents)) for key, item in value.items())
        return (type(value), tuple(items))
    if isinstance(value, (list, tuple)):
        return (type(value), tuple(signature(item, with_contents=with_contents) for item in value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        items = ((f.name, signature(getattr(value, f.name), with_contents=with_contents)) for f in fields)
        return (type(value), tuple(items))
    has_value = with_contents and isinstance(value, (int, float, str, bool))
    return value if has_value or value is None else type(value)
