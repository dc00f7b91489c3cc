"""Materializes shards of a randomly initialised tensor: draws it in chunks, without the full tensor in memory.

A call that fills a contiguous range element by element draws the same values in chunks if each chunk but the last is
a multiple of 16 elements long and the last has at least 16 (normal_ transforms 16 numbers at once, and draws the last
16 of a range again). This does not hold for kernels that seed their own stream in each call, as MKL's bernoulli_ on
Intel's processors does. So each kind of call is tried before use.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.strategy.deferred.tape import Entry, Storage, Tape, drawing_from, meta_tensors, storage_of

aten = torch.ops.aten

_RANDOM = {
    aten.uniform_.default,
    aten.normal_.default,
    aten.bernoulli_.float,
    aten.exponential_.default,
    aten.cauchy_.default,
    aten.log_normal_.default,
    aten.geometric_.default,
    aten.random_.default,
    aten.random_.to,
    aten.random_.__getattr__("from"),
}
# Calls that change each element in place; their other arguments are numbers or, as `_write_of` checks, 0-dim tensors.
_ELEMENTWISE = {
    aten.fill_.Scalar,
    aten.fill_.Tensor,
    aten.zero_.default,
    aten.mul_.Tensor,
    aten.mul_.Scalar,
    aten.add_.Tensor,
    aten.add_.Scalar,
    aten.sub_.Tensor,
    aten.sub_.Scalar,
    aten.div_.Tensor,
    aten.div_.Scalar,
    aten.clamp_.default,
    aten.clamp_min_.default,
    aten.clamp_max_.default,
    aten.neg_.default,
    aten.abs_.default,
    aten.exp_.default,
    aten.sqrt_.default,
    aten.rsqrt_.default,
    aten.erfinv_.default,
    aten.tanh_.default,
    aten.pow_.Scalar,
}
EMPTY = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_permuted.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.empty_like.default,
}
_CONSTANT = {aten.zeros.default: 0, aten.ones.default: 1, aten.zeros_like.default: 0, aten.ones_like.default: 1}
_VIEWS = {
    aten.detach.default,
    aten.alias.default,
    aten.view.default,
    aten._unsafe_view.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unbind.int,
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.expand.default,
}
_CHUNK = 1 << 16  # elements
_MAX_CHUNK = 1 << 22  # elements


@dataclass(frozen=True)
class _Write:
    """A call that writes the elements `first` to `end` (exclusive) of a storage, in memory order."""

    entry: Entry
    first: int
    end: int


_known_results: dict[tuple[Any, torch.dtype, tuple[Any, ...]], bool] = {}


def draws_in_chunks(function: Any, dtype: torch.dtype, args: tuple[Any, ...]) -> bool:
    """Return whether drawing a contiguous tensor in chunks gives the values and generator state of a single call.

    Args:
        args: the arguments of the call after the tensor.
    """
    if function not in _RANDOM:
        return False
    key = (function, dtype, args)
    if key not in _known_results:
        # A chunk of a multiple of 16 elements and a last one of more than 16, against one call for both.
        _known_results[key] = _drawn(function, dtype, args, 85) == _drawn(function, dtype, args, 48, 37)
    return _known_results[key]


def _drawn(function: Any, dtype: torch.dtype, args: tuple[Any, ...], *sizes: int) -> tuple[bytes, ...]:
    """Return the bits of a tensor drawn in ranges of these sizes, and the generator's state afterwards."""
    generator = torch.Generator("cpu").manual_seed(1)
    full = torch.empty(sum(sizes), dtype=dtype, device="cpu")
    for chunk in full.split(sizes):
        function(chunk, *args, generator=generator)
    return tuple(values.view(torch.uint8).numpy().tobytes() for values in (full, generator.get_state()))


def chunks(num_elements: int, multiple_of: int = 16) -> Iterator[tuple[int, int]]:
    """Yield the ranges (first, end) of a chunked random call, in elements.

    They begin at multiples of `multiple_of`, which must be a multiple of 16.
    """
    size = max(1, _CHUNK // multiple_of) * multiple_of
    first = 0
    while first < num_elements:
        end = first + size
        if num_elements - end < 16:
            end = num_elements
        yield first, end
        first = end


def skip(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], like: Tensor) -> None:
    """Advance the generator as a random call on a contiguous tensor of the size of `like` would."""
    for first, end in chunks(like.numel()):
        function(torch.empty(end - first, dtype=like.dtype), *args, **kwargs)


def shard(tape: Tape, meta: Tensor, dim: int, start: int, length: int) -> Tensor | None:
    """Return `narrow(dim, start, length)` of the values of `meta`, contiguous; None if that requires the full tensor.

    Args:
        meta: must be contiguous and cover all of its storage; else the result is None.
    """
    if not meta.is_contiguous() or meta.untyped_storage().nbytes() != meta.numel() * meta.element_size():
        return None
    found = _writes(tape, storage_of(meta), meta)
    if found is None:
        return None
    # The tensor as [outer, size of dim, inner]; the shard as [outer, length, inner].
    outer, inner = math.prod(meta.shape[:dim]), math.prod(meta.shape[dim + 1 :])
    row = meta.shape[dim] * inner  # elements
    initial, writes = found
    if not all(_applies_to_shard(write, outer, row) for write in writes):
        return None
    result = torch.empty(outer, length, inner, dtype=meta.dtype)
    if initial is not None:
        result.fill_(initial)
    for write in writes:
        if write.entry.random is not None:
            _draw(write, result, meta.shape[dim], start, inner)
        else:
            _apply(write, result, row, start, inner)
    return result.view(*meta.shape[:dim], length, *meta.shape[dim + 1 :])


def _writes(tape: Tape, storage: Storage, meta: Tensor) -> tuple[float | None, list[_Write]] | None:
    """Return a storage's initial value (None: uninitialised) and the calls that determine its values, in order.

    Calls before the last one that overwrites the full storage are left out. The result is None if one of the remaining
    calls cannot be represented by a `_Write`.
    """
    initial: float | None = None
    writes: list[_Write] = []
    is_known = True
    for entry in tape.entries_of(storage):
        function = entry.function
        if function in EMPTY or function in _VIEWS:
            continue
        if function in _CONSTANT or function is aten.full.default:
            initial = _CONSTANT[function] if function in _CONSTANT else entry.args[1]
            continue
        write = _write_of(entry, meta)
        if write is None:
            is_known = False
            continue
        if write.first == 0 and write.end == meta.numel() and (function in _RANDOM or _overwrites(function)):
            writes.clear()
            is_known = True
        writes.append(write)
    return (initial, writes) if is_known else None


def _write_of(entry: Entry, meta: Tensor) -> _Write | None:
    """Return an entry as a `_Write`; None if it is no elementwise or chunked random call on a contiguous range."""
    function = entry.function
    target: Any = entry.args[0] if entry.args else None
    if function not in _RANDOM and function not in _ELEMENTWISE:
        return None
    if not target.is_contiguous() or target.dtype != meta.dtype or meta_tensors(entry.args[1:], entry.kwargs):
        return None
    if any(isinstance(arg, Tensor) and arg.dim() > 0 for arg in entry.args[1:]):
        return None
    if function in _RANDOM and not draws_in_chunks(function, target.dtype, entry.args[1:]):
        return None
    first = target.storage_offset()
    return _Write(entry, first, first + target.numel())


def is_written(tape: Tape, meta: Tensor) -> bool:
    """Return whether any call writes values to a tensor."""
    storage = storage_of(meta)
    functions = (entry.function for entry in tape.entries_of(storage))
    return storage in tape.materialized or any(
        function not in EMPTY and function not in _VIEWS for function in functions
    )


def _overwrites(function: Any) -> bool:
    """Return whether the results of an elementwise call do not depend on the previous values."""
    return function in (aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default)


def _applies_to_shard(write: _Write, outer: int, row: int) -> bool:
    """Return whether a call can be applied to a shard of a tensor of `outer` rows of `row` elements.

    With several rows, the call's range must consist of full rows; a random call is drawn in chunks of full rows, and
    the smallest possible chunk must not exceed `_MAX_CHUNK`. A shard of a single row is a contiguous range.
    """
    if outer > 1 and (write.first % row or write.end % row):
        return False
    return outer == 1 or write.entry.random is None or math.lcm(row, 16) <= _MAX_CHUNK


def _apply(write: _Write, result: Tensor, row: int, start: int, inner: int) -> None:
    """Apply an elementwise call to the shard `result`, `[outer, length, inner]`."""
    if result.shape[0] > 1:
        elements = result[write.first // row : write.end // row]
    else:  # one row: the shard is the range from start * inner
        offset = start * inner
        flat = result.view(-1)
        elements = flat[max(write.first - offset, 0) : max(write.end - offset, 0)]
    write.entry.function(elements, *write.entry.args[1:], **write.entry.kwargs)


def _draw(write: _Write, result: Tensor, size: int, start: int, inner: int) -> None:
    """Draw the full range of a random call in chunks, and keep the elements of the shard.

    Args:
        result: the shard, `[outer, length, inner]`, of a tensor `[outer, size, inner]`, from `start` on.
    """
    num_rows, length, _ = result.shape
    row = size * inner
    multiple = 16 if num_rows == 1 else math.lcm(row, 16)
    flat, offset = result.view(-1), start * inner
    with drawing_from(write.entry.random):
        for begin, stop in chunks(write.end - write.first, multiple):
            drawn = torch.empty(stop - begin, dtype=result.dtype)
            write.entry.function(drawn, *write.entry.args[1:], **write.entry.kwargs)
            first, end = write.first + begin, write.first + stop
            if num_rows == 1:
                low, high = max(first, offset), min(end, offset + flat.numel())
                if low < high:
                    flat[low - offset : high - offset] = drawn[low - first : high - first]
            else:
                rows = drawn.view(-1, size, inner)
                result[first // row : end // row] = rows[:, start : start + length]
