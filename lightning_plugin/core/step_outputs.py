"""Joins the results of a step for each micro-batch, and broadcasts them from the last stage to all."""

from __future__ import annotations

import dataclasses
import numbers
import pickle
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

_MAX_PICKLED_BYTES = 1 << 14  # bytes up to which a CPU tensor is pickled with the rest of the message


def join_outputs(outputs: Sequence[Any], sizes: Sequence[int | None], weights: Sequence[float]) -> Any:
    """Return one value for a batch, from a step's results for each of its micro-batches.

    Dicts, lists and tuples are joined item by item. Tensors with the samples along dim 0 are concatenated, and so are
    lists with an item for each sample; numbers and tensors of one number become their weighted mean. For other values
    without tensors, which must be equal, the value itself is returned.

    Args:
        outputs: the result for each micro-batch.
        sizes: the number of samples of each micro-batch. None: the number is unknown, and tensors with dims are
            concatenated.
        weights: the weight of each micro-batch.

    Raises:
        TypeError: the results cannot be joined.
    """
    first = outputs[0]
    if len(outputs) == 1 or first is None:
        return first
    if all(isinstance(v, list) and len(v) == size for v, size in zip(outputs, sizes, strict=True)):
        return [item for value in outputs for item in value]
    if not _has_tensors(list(outputs)) and all(type(value) is type(first) and value == first for value in outputs):
        return first
    if isinstance(first, Tensor):
        is_one_number = all(value.numel() == 1 for value in outputs)
        if first.dim() == 0 or (is_one_number and any(size is not None and size > 1 for size in sizes)):
            return weighted_mean(outputs, weights).reshape(first.shape)
        if all(size is None or value.shape[0] == size for value, size in zip(outputs, sizes, strict=True)):
            return torch.cat(list(outputs))
    elif isinstance(first, dict):
        if all(value.keys() == first.keys() for value in outputs):
            joined = {key: join_outputs([value[key] for value in outputs], sizes, weights) for key in first}
            return joined if type(first) is dict else type(first)(joined)
    elif isinstance(first, (list, tuple)) and all(len(value) == len(first) for value in outputs):
        items = [join_outputs(each, sizes, weights) for each in zip(*outputs, strict=True)]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    elif isinstance(first, numbers.Number) and not isinstance(first, bool):
        return weighted_mean([torch.tensor(float(v), dtype=torch.float64) for v in outputs], weights).item()
    raise TypeError(
        f"pipeline: a step returned a {_description(first)} for each micro-batch, which cannot be joined; return "
        "tensors with the samples along dim 0, numbers, or dicts and tuples of them."
    )


def weighted_mean(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the weighted mean of scalars, in the first value's dtype; for integers, in the default dtype.

    Values with a weight of 0 are left out, unless all weights are 0: then all values have the same weight.
    """
    pairs = [(v.detach().double(), w) for v, w in zip(values, weights, strict=True) if w > 0]
    pairs = pairs or [(value.detach().double(), 1.0) for value in values]
    mean = torch.stack([value.reshape(()) * weight for value, weight in pairs]).sum() / sum(w for _, w in pairs)
    return mean.to(values[0].dtype if values[0].is_floating_point() else torch.get_default_dtype())


def _has_tensors(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value))


def _description(value: Any) -> str:
    return f"tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


@dataclasses.dataclass(frozen=True)
class _TensorPlaceholder:
    """Replaces a tensor in the pickled message; the tensor is broadcast after the message."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device_type: str


@dataclasses.dataclass(frozen=True)
class Serialized:
    """A value ready to be broadcast; see `serialize`.

    value: the given value.
    pickled: the value with placeholders for `tensors`.
    tensors: the tensors that are broadcast separately, because they are large or not on the CPU.
    """

    value: Any
    pickled: bytes
    tensors: list[Tensor]


def serialize(value: Any) -> Serialized:
    """Return a value ready for `broadcast_serialized`; errors are raised here, before any rank waits for the value.

    Raises:
        TypeError: the value contains an object that cannot be pickled.
    """
    tensors: list[Tensor] = []
    try:
        return Serialized(
            value, pickle.dumps(pytree.tree_map(lambda leaf: _replace_tensor(leaf, tensors), value)), tensors
        )
    except Exception as error:
        raise TypeError(
            f"pipeline: a step returned or logged a value that cannot be sent to other stages ({error}); use tensors, "
            "numbers, texts and collections of them."
        ) from error


def broadcast_serialized(
    serialized: Serialized | None, group: dist.ProcessGroup, source: int, device: torch.device
) -> Any:
    """Return the value of the rank `source` on every rank of a group; collective.

    Args:
        serialized: the value on `source`; None on the other ranks.
        group: the ranks that get the value.
        source: the rank in `group` that has the value.
        device: this rank's device, from and to which tensors are broadcast. A tensor from a device of the same type is
            returned on `device`, a CPU tensor on the CPU.
    """
    if serialized is not None and group.size() == 1:
        return serialized.value
    if serialized is not None:
        dist.broadcast_object_list([serialized.pickled], group_src=source, group=group)
        for tensor in serialized.tensors:
            dist.broadcast(tensor.to(device), group_src=source, group=group)
        return serialized.value
    message: list[Any] = [None]
    dist.broadcast_object_list(message, group_src=source, group=group)
    return pytree.tree_map(lambda leaf: _receive_tensor(leaf, group, source, device), pickle.loads(message[0]))


def _replace_tensor(leaf: Any, tensors: list[Tensor]) -> Any:
    """Return a leaf to pickle; a tensor that is broadcast separately is appended to `tensors`."""
    if not isinstance(leaf, Tensor):
        return leaf
    if leaf.device.type == "cpu" and leaf.nbytes <= _MAX_PICKLED_BYTES:
        return leaf.detach().clone()  # a view would be pickled with its full storage
    tensors.append(leaf.detach().contiguous())
    return _TensorPlaceholder(tuple(leaf.shape), leaf.dtype, leaf.device.type)


def _receive_tensor(leaf: Any, group: dist.ProcessGroup, source: int, device: torch.device) -> Any:
    if not isinstance(leaf, _TensorPlaceholder):
        return leaf
    tensor = torch.empty(leaf.shape, dtype=leaf.dtype, device=device)
    dist.broadcast(tensor, group_src=source, group=group)
    return tensor.to(leaf.device_type) if leaf.device_type != device.type else tensor


def picklable_error(error: Exception) -> Exception:
    """Return a copy of an error that can be pickled, else a RuntimeError with its type's name and its text."""
    try:
        copy: Exception = pickle.loads(pickle.dumps(error))
        return copy
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
