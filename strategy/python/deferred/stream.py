"""Materializes shards of a randomly initialised tensor: draws it in chunks, without the full tensor in memory.

A call that fills a contiguous range element by element draws the same values in chunks if each chunk but the last is
a multiple of a unit long and the last has at least 16 elements.

On a CPU the unit is 16 elements: normal_ transforms 16 numbers at once, and draws the last 16 of a range again. This
does not hold for kernels that seed their own stream in each call, as MKL's bernoulli_ on Intel's processors does.

On CUDA the unit is what all threads of a full grid draw at once (ATen/native/cuda/DistributionTemplates.h). Thread t
has the Philox subsequence t. In its k-th turn it draws four 32-bit numbers from the generator's offset plus 4k, for the
elements k * unit + t, + t + number of threads, and so on. A call increases the offset by 4 for each turn, so a chunk
that begins at a multiple of the unit continues the stream. A last chunk with fewer elements than threads has a smaller
grid, but each of its threads draws one element, the first of a turn, in both cases. Calls on more than 2 GiB are split
by ATen in halves with streams of their own, so they are not drawn in chunks.

Each kind of call is tried before it is drawn in several chunks.

Numbers that are not needed, such as those of other ranks' shards, are not drawn if the generator can be advanced past
them: for torch's CPU generator and kinds of calls that draw the same count of numbers for each element, which is tried,
too. That takes a twentieth of the time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.strategy._plan import cpu_generator_after
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
ELEMENTWISE = {
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
CONSTANT = {aten.zeros.default: 0, aten.ones.default: 1, aten.zeros_like.default: 0, aten.ones_like.default: 1}
VIEWS = {
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
_CHUNK = 1 << 16  # elements, if that is a multiple of the unit
_MAX_CUDA_BYTES = (1 << 31) - 1  # of a call that ATen does not split


@dataclass(frozen=True)
class _Write:
    """A call that writes the elements `first` to `end` (exclusive) of a storage, in memory order."""

    entry: Entry
    first: int
    end: int


_known_results: dict[tuple[Any, torch.dtype, tuple[Any, ...], torch.device], bool] = {}
_known_counts: dict[tuple[Any, torch.dtype, tuple[Any, ...]], int] = {}  # numbers for each element; 0: not known


def unit_of(device: torch.device) -> int:
    """Return the unit of chunks of a random call on a device, in elements: see the top of this file."""
    if device.type == "cpu":
        return 16
    properties = torch.cuda.get_device_properties(device)
    threads_per_block, numbers_per_turn = 256, 4  # float64 has two numbers in a turn, and half of this unit
    blocks = properties.multi_processor_count * (properties.max_threads_per_multi_processor // threads_per_block)
    return blocks * threads_per_block * numbers_per_turn


def is_drawn_in_chunks(function: Any, args: tuple[Any, ...], target: Tensor, device: torch.device) -> bool:
    """Return whether a random call on `target`, a meta tensor that represents one on `device`, is drawn in chunks.

    Args:
        args: the arguments of the call after the tensor.
    """
    if function not in _RANDOM or device.type not in ("cpu", "cuda") or not target.is_contiguous():
        return False
    if device.type == "cuda" and target.numel() * target.element_size() > _MAX_CUDA_BYTES:
        return False
    is_one_chunk = target.numel() <= _chunk_size(unit_of(device))
    return is_one_chunk or draws_in_chunks(function, target.dtype, args, device)


def draws_in_chunks(function: Any, dtype: torch.dtype, args: tuple[Any, ...], device: torch.device) -> bool:
    """Return whether drawing a contiguous tensor in chunks gives the values and generator state of a single call.

    Args:
        args: the arguments of the call after the tensor.
        device: with its index.
    """
    if function not in _RANDOM:
        return False
    key = (function, dtype, args, device)
    if key not in _known_results:
        # A chunk of a multiple of the unit and a last one of more than 16 elements, against one call for both.
        unit = unit_of(device)
        sizes = (max(48 // unit, 1) * unit, 37)
        in_one_call = _drawn(function, dtype, args, device, (sum(sizes),))
        _known_results[key] = in_one_call == _drawn(function, dtype, args, device, sizes)
    return _known_results[key]


def _drawn(
    function: Any, dtype: torch.dtype, args: tuple[Any, ...], device: torch.device, sizes: tuple[int, ...]
) -> tuple[bytes, ...]:
    """Return the bits of a tensor drawn in ranges of these sizes, and the generator's state afterwards."""
    generator = torch.Generator(device).manual_seed(1)
    full = torch.empty(sum(sizes), dtype=dtype, device=device)
    for chunk in full.split(sizes):
        function(chunk, *args, generator=generator)
    return tuple(values.cpu().view(torch.uint8).numpy().tobytes() for values in (full, generator.get_state()))


def _chunk_size(unit: int) -> int:
    return max(1, _CHUNK // unit) * unit


def chunks(num_elements: int, unit: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges (first, end) of a chunked random call, in elements."""
    first = 0
    while first < num_elements:
        end = first + _chunk_size(unit)
        if num_elements - end < 16:
            end = num_elements
        yield first, end
        first = end


def _draw_chunks(
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    num_elements: int,
    like: Tensor,
    wanted: tuple[int, int],
) -> Iterator[tuple[int, Tensor]]:
    """Make a random call on a contiguous tensor with the dtype and device of `like`, in chunks.

    Args:
        wanted: the first element and the end (exclusive) of a range; chunks before it are passed over if that is
            possible, and those after it are not drawn.

    Yields:
        The index of a chunk's first element, and the values, which the next chunk overwrites.
    """
    ranges = [each for each in chunks(num_elements, unit_of(like.device)) if each[0] < wanted[1]]
    numbers = _numbers_per_element(function, args, like)
    num_passed = sum(end <= wanted[0] for _, end in ranges) if numbers else 0
    if num_passed:
        _pass_over(ranges[num_passed - 1][1] * numbers, kwargs.get("generator") or torch.default_generator)
    buffer = like.new_empty(max((end - first for first, end in ranges), default=0))
    for first, end in ranges[num_passed:]:
        values = buffer[: end - first]
        function(values, *args, **kwargs)
        yield first, values


def _numbers_per_element(function: Any, args: tuple[Any, ...], like: Tensor) -> int:
    """Return how many 32-bit numbers a random call draws from a CPU generator for each element; 0: not known."""
    if like.device.type != "cpu":
        return 0
    key = (function, like.dtype, args)
    if key not in _known_counts:
        _known_counts[key] = next((n for n in (1, 2) if _draws_count(n, function, args, like.dtype)), 0)
    return _known_counts[key]


def _draws_count(count: int, function: Any, args: tuple[Any, ...], dtype: torch.dtype) -> bool:
    """Return whether a call on a multiple of 16 elements draws `count` numbers for each."""
    for num_elements in (16, 48, 1024):
        drawn, advanced = torch.Generator("cpu").manual_seed(1), torch.Generator("cpu").manual_seed(1)
        for generator in (drawn, advanced):
            # Leaves the second of two normal numbers in the generator, which log_normal_ would take.
            torch.empty(1, dtype=torch.float64, device="cpu").normal_(generator=generator)
        function(torch.empty(num_elements, dtype=dtype, device="cpu"), *args, generator=drawn)
        try:
            _pass_over(num_elements * count, advanced)
        except ValueError:  # a state of another layout
            return False
        if not torch.equal(drawn.get_state(), advanced.get_state()):
            return False
    return True


def _pass_over(count: int, generator: torch.Generator) -> None:
    """Advance a CPU generator past 32-bit numbers."""
    state = generator.get_state().numpy().tobytes()
    generator.set_state(torch.frombuffer(bytearray(cpu_generator_after(state, count)), dtype=torch.uint8))


def skip(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], meta: Tensor, device: torch.device) -> None:
    """Advance the generator as a random call on a contiguous tensor on `device`, as `meta` describes it, would."""
    like = torch.empty(0, dtype=meta.dtype, device=device)
    # The last chunk is drawn: its end may draw numbers again.
    for _ in _draw_chunks(function, args, kwargs, meta.numel(), like, (max(meta.numel() - 1, 0), meta.numel())):
        pass


def shard(tape: Tape, meta: Tensor, device: torch.device, dim: int, start: int, length: int) -> Tensor | None:
    """Return `narrow(dim, start, length)` of the values of `meta`, contiguous; None if that requires the full tensor.

    Args:
        meta: must be contiguous and cover all of its storage; else the result is None.
        device: of the tensor that `meta` represents.
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
    result = torch.empty(outer, length, inner, dtype=meta.dtype, device=device)
    if initial is not None:
        result.fill_(initial)
    for write in writes:
        if write.entry.random is not None:
            _draw(write, result, row, start, inner)
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
        if function in EMPTY or function in VIEWS:
            continue
        if function in CONSTANT or function is aten.full.default:
            initial = CONSTANT[function] if function in CONSTANT else entry.args[1]
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
    if function not in _RANDOM and function not in ELEMENTWISE:
        return None
    if not target.is_contiguous() or target.dtype != meta.dtype or meta_tensors(entry.args[1:], entry.kwargs):
        return None
    if any(isinstance(arg, Tensor) and arg.dim() > 0 for arg in entry.args[1:]):
        return None
    if entry.random is not None:
        # An explicit index: the device of a deferred tensor may have none.
        device = entry.random.generator.device
        if not is_drawn_in_chunks(function, entry.args[1:], target, device):
            return None
    first = target.storage_offset()
    return _Write(entry, first, first + target.numel())


def is_written(tape: Tape, meta: Tensor) -> bool:
    """Return whether any call writes values to a tensor."""
    storage = storage_of(meta)
    functions = (entry.function for entry in tape.entries_of(storage))
    return storage in tape.materialized or any(
        function not in EMPTY and function not in VIEWS for function in functions
    )


def _overwrites(function: Any) -> bool:
    """Return whether the results of an elementwise call do not depend on the previous values."""
    return function in (aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default)


def _applies_to_shard(write: _Write, outer: int, row: int) -> bool:
    """Return whether a call can be applied to a shard of a tensor of `outer` rows of `row` elements.

    With several rows, the range of an elementwise call must consist of full rows. A shard of a single row is
    a contiguous range.
    """
    return outer == 1 or write.entry.random is not None or (write.first % row == 0 and write.end % row == 0)


def _apply(write: _Write, result: Tensor, row: int, start: int, inner: int) -> None:
    """Apply an elementwise call to the shard `result`, `[outer, length, inner]`."""
    if result.shape[0] > 1:
        elements = result[write.first // row : write.end // row]
    else:  # one row: the shard is the range from start * inner
        offset = start * inner
        flat = result.view(-1)
        elements = flat[max(write.first - offset, 0) : max(write.end - offset, 0)]
    write.entry.function(elements, *write.entry.args[1:], **write.entry.kwargs)


def _draw(write: _Write, result: Tensor, row: int, start: int, inner: int) -> None:
    """Draw the chunks of a random call that have elements of the shard, and keep these.

    Args:
        result: the shard, `[outer, length, inner]`, of a tensor of `outer` rows of `row` elements; `start * inner` is
            its first element in each row.
    """
    entry, num_elements = write.entry, write.end - write.first
    assert entry.random is not None
    like = torch.empty(0, dtype=result.dtype, device=entry.random.generator.device)
    low = start * inner - write.first
    # If there are several rows, almost every chunk has elements of the shard.
    wanted = (low, low + result.numel()) if result.shape[0] == 1 else (0, num_elements)
    with drawing_from(entry.random):
        chunks_of_call = _draw_chunks(entry.function, entry.args[1:], entry.kwargs, num_elements, like, wanted)
        for first, values in chunks_of_call:
            _keep(values, write.first + first, result, row, start * inner)


def _keep(values: Tensor, first: int, result: Tensor, row: int, low: int) -> None:
    """Copy the elements of a shard from `values`, which are elements of the tensor from `first` on, in memory order.

    Args:
        result: the shard, `[outer, length, inner]`, of a tensor of `outer` rows of `row` elements.
        low: the shard's first element in each row.
    """
    shard = result.view(result.shape[0], result.shape[1] * result.shape[2])
    high = low + shard.shape[1]
    position = 0  # in `values`
    while position < values.numel():
        index, column = divmod(first + position, row)
        num_rows = (values.numel() - position) // row
        if column == 0 and num_rows > 0:
            full_rows = values[position : position + num_rows * row].view(num_rows, row)
            shard[index : index + num_rows] = full_rows[:, low:high]
            position += num_rows * row
        else:
            rest = values[position : position + row - column]  # of this row, from `column` on
            begin, end = max(column, low), min(column + rest.numel(), high)
            if begin < end:
                shard[index, begin - low : end - low] = rest[begin - column : end - column]
            position += rest.numel()
