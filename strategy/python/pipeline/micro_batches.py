"""How a batch becomes micro-batches."""

from __future__ import annotations

import collections
import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor


def batch_size_of(batch: Any) -> int:
    """The number of samples: the size along dim 0 that most tensors of a batch have.

    Raises:
        ValueError: no tensor with a dim, or several sizes that equally many have.
    """
    sizes = collections.Counter(tensor.shape[0] for tensor in _tensors(batch) if tensor.dim() > 0)
    if not sizes:
        raise ValueError(
            "the batch holds no tensor with a dim to cut into micro-batches; pass split= and weight= (a Trainer's "
            "strategy: split_batch= and micro_batch_weight=), which cut and weigh it your way."
        )
    (size, count), *others = sizes.most_common()
    if others and others[0][1] == count:
        raise ValueError(
            f"the batch's tensors have the sizes {sorted(sizes)} along dim 0, equally often, so that none is known as "
            "the number of samples; pass split= and weight= (a Trainer's strategy: split_batch= and "
            "micro_batch_weight=), which cut and weigh it your way."
        )
    return size


def split_batch(batch: Any, num_micro_batches: int) -> list[Any]:
    """Cut every tensor that has the batch's size along dim 0; other values are in every micro-batch.

    Dicts and other mappings (BatchEncoding, too), lists, tuples, named tuples and dataclasses keep their types. The
    parts are views, as even as can be, the first ones larger.

    Raises:
        ValueError: see `batch_size_of`; fewer samples than micro-batches.
    """
    size = batch_size_of(batch)
    if size < num_micro_batches:
        raise ValueError(f"a batch of {size} samples has no {num_micro_batches} micro-batches; pass at most {size}.")

    def part(tensor: Tensor, i: int) -> Tensor:
        return tensor.tensor_split(num_micro_batches)[i] if _has_samples(tensor, size) else tensor

    return [_map(lambda tensor, i=i: part(tensor, i), batch) for i in range(num_micro_batches)]


def first_samples(batch: Any, num_samples: int) -> Any:
    """The first samples of a batch, cut as `split_batch` cuts it."""
    size = batch_size_of(batch)
    return _map(lambda tensor: tensor[:num_samples] if _has_samples(tensor, size) else tensor, batch)


def _has_samples(tensor: Tensor, size: int) -> bool:
    return tensor.dim() > 0 and tensor.shape[0] == size


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    _map(lambda tensor: found.append(tensor) or tensor, value)
    return found


def _map(function: Callable[[Tensor], Any], value: Any) -> Any:
    """The same collections with `function` of each tensor."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        items = {key: _map(function, item) for key, item in value.items()}
        if isinstance(value, collections.defaultdict):
            return collections.defaultdict(value.default_factory, items)
        return items if type(value) is dict else type(value)(items)
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


def signature(value: Any) -> Any:
    """What a batch is but for its values: hashable, equal for batches that a forward treats alike."""
    if isinstance(value, Tensor):
        return ("tensor", tuple(value.shape), value.dtype, value.device.type, value.requires_grad)
    if isinstance(value, Mapping):
        return (type(value), tuple((key, signature(item)) for key, item in value.items()))
    if isinstance(value, (list, tuple)):
        return (type(value), tuple(signature(item) for item in value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return (type(value), tuple((field.name, signature(getattr(value, field.name))) for field in fields))
    return value if isinstance(value, (int, float, str, bool, type(None))) else type(value)
