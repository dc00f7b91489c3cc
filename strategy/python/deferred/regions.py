"""Materializes a region of a deferred tensor: computes no other elements, and reads no others from files.

The tape is evaluated backwards, for one region at a time. A region of a tensor is mapped through the views on its
storage to a region of the tensor that fills the storage. There it is the result of the call that created the storage
(elements of a file, a constant, or a region of the call's arguments: `to`, `cat`, `stack`, ...), followed by the calls
that wrote to parts of it, in program order. The result is None where a call has no rule here; the caller then replays
the tape for the full tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.strategy.deferred import stream
from weft.strategy.deferred.files import FileTensor, Region, read_full
from weft.strategy.deferred.tape import Entry, Tape, meta_tensors, storage_of
from weft.strategy.deferred.views import in_storage, offsets_in_storage, shape_of

aten = torch.ops.aten

_CONVERSIONS = {aten._to_copy.default, aten.clone.default}
_CONSTANT = {**stream.CONSTANT, aten.new_zeros.default: 0, aten.new_ones.default: 1}


@dataclass(frozen=True)
class _Values:
    """Elements of a region.

    Attributes:
        tensor: has the shape of the region.
        is_owned: whether its memory is new, so that it may be changed.
    """

    tensor: Tensor
    is_owned: bool


def region_of(tape: Tape, meta: Tensor, device: torch.device, region: Region) -> Tensor | None:
    """Return the elements of a region of a deferred tensor, contiguous and in new memory; None if no rule applies.

    Args:
        meta: the deferred tensor on the tape.
        device: of the tensor that `meta` represents.
        region: the first index and the end in each dim.

    Raises:
        RuntimeError: as `Tape.replay`.
    """
    if any(first >= end for first, end in region):
        return torch.empty(shape_of(region), dtype=meta.dtype, device=device)
    with torch.no_grad():
        values = _read(tape, meta, region, len(tape.entries), device)
        if values is None:
            return None
        tensor = values.tensor.to(device)
        is_owned = values.is_owned or tensor is not values.tensor
        fits = tensor.untyped_storage().nbytes() == tensor.nbytes and tensor.is_contiguous()
        return tensor if is_owned and fits else tensor.clone(memory_format=torch.contiguous_format)


def _read(tape: Tape, meta: Tensor, region: Region, before: int, device: torch.device) -> _Values | None:
    """Return the elements of a region as they are after the calls with indices below `before`."""
    mapped = in_storage(tape, meta, region)
    if mapped is None:
        return None
    base, base_region, restore = mapped
    values = _read_base(tape, base, base_region, before, device)
    return None if values is None else _Values(restore(values.tensor), values.is_owned)


def _read_base(tape: Tape, base: Tensor, region: Region, before: int, device: torch.device) -> _Values | None:
    """Return the elements of a region of the tensor that fills a storage: see `_read`."""
    storage = storage_of(base)
    # A recorded call precedes the materialization of the storages that it reads: later calls are not recorded.
    if storage in tape.materialized and before == len(tape.entries):
        full = tape.materialized[storage].detach().as_strided(base.shape, base.stride(), 0)
        return _Values(full[tuple(slice(first, end) for first, end in region)], is_owned=False)
    entries = tape.indexed_entries_of(storage)
    writes = [(i, entry) for i, entry in entries if storage in entry.writes and entry.function not in stream.VIEWS]
    calls = [(index, entry) for index, entry in writes if index < before]
    is_copy = [_overwrites(tape, entry, base) for _, entry in calls]
    values: _Values | None
    if any(is_copy):
        # The calls before the last copy to the full tensor do not matter.
        calls = calls[len(calls) - 1 - is_copy[::-1].index(True) :]
        values = _Values(torch.empty(shape_of(region), dtype=base.dtype, device="meta"), is_owned=False)
    elif any(entry.random is not None for _, entry in calls):
        # Its rules look at all calls.
        return _random(tape, base, region, device) if len(calls) == len(writes) else None
    else:
        index, creator = calls.pop(0)
        values = _created(tape, creator, index, region, device)
    for index, entry in calls:
        if values is not None:
            values = _written(tape, entry, index, region, values, device)
    return values


def _overwrites(tape: Tape, entry: Entry, base: Tensor) -> bool:
    """Return whether a call copies another tensor to all of a storage."""
    if entry.function is not aten.copy_.default or entry.args[0].shape != base.shape:
        return False
    return entry.args[1].shape == base.shape and offsets_in_storage(tape, entry.args[0]) is not None


def _created(tape: Tape, entry: Entry, index: int, region: Region, device: torch.device) -> _Values | None:
    """Return a region of the result of the call that created a storage."""
    function, args = entry.function, entry.args
    entry.check_versions()
    if function is read_full:
        source: FileTensor = args[0]
        return _Values(source.read(region), is_owned=False)
    result: Tensor = entry.result if isinstance(entry.result, Tensor) else meta_tensors(entry.result)[0]
    if function in stream.EMPTY or function in _CONSTANT or function is aten.full.default:
        made = torch.empty(shape_of(region), dtype=result.dtype, device=device)
        constant = args[1] if function is aten.full.default else _CONSTANT.get(function)
        return _Values(made if constant is None else made.fill_(constant), is_owned=True)
    if function in _CONVERSIONS:
        values = _argument(tape, args[0], region, index, device)
        if values is None or values.tensor.dtype == result.dtype:
            return values
        return _Values(values.tensor.to(result.dtype), is_owned=True)
    if function is aten.cat.default:
        return _concatenated(tape, entry, index, region, device)
    if function is aten.stack.default:
        dim = (args[1] if len(args) > 1 else 0) % result.dim()
        inner = (*region[:dim], *region[dim + 1 :])
        parts = [_argument(tape, each, inner, index, device) for each in args[0][slice(*region[dim])]]
        if not parts or any(part is None for part in parts):
            return None
        tensors = [part.tensor for part in parts if part is not None]
        return _Values(torch.stack([each.to(tensors[0].device) for each in tensors], dim), is_owned=True)
    return None


def _argument(tape: Tape, tensor: Tensor, region: Region, before: int, device: torch.device) -> _Values | None:
    """Return a region of a call's tensor argument, deferred or with values."""
    if tensor.is_meta:
        return _read(tape, tensor, region, before, device)
    return _Values(tensor.detach()[tuple(slice(first, end) for first, end in region)], is_owned=False)


def _concatenated(tape: Tape, entry: Entry, index: int, region: Region, device: torch.device) -> _Values | None:
    tensors: list[Tensor] = list(entry.args[0])
    dim = (entry.args[1] if len(entry.args) > 1 else 0) % entry.result.dim()
    if any(tensor.dim() != entry.result.dim() or tensor.dtype != entry.result.dtype for tensor in tensors):
        return None
    made: Tensor | None = None
    start = 0  # of the tensor, in the result
    for tensor in tensors:
        first, end = (min(max(bound - start, 0), tensor.shape[dim]) for bound in region[dim])
        if first < end:
            part = _argument(tape, tensor, (*region[:dim], (first, end), *region[dim + 1 :]), index, device)
            if part is None:
                return None
            if shape_of(region)[dim] == end - first:
                return part
            if made is None:
                made = torch.empty(shape_of(region), dtype=part.tensor.dtype, device=part.tensor.device)
            made.narrow(dim, first + start - region[dim][0], end - first).copy_(part.tensor)
        start += tensor.shape[dim]
    return None if made is None else _Values(made, is_owned=True)


def _written(
    tape: Tape, entry: Entry, index: int, region: Region, values: _Values, device: torch.device
) -> _Values | None:
    """Return the elements of a region after a call that wrote to a part of the storage."""
    function, target = entry.function, entry.args[0]
    entry.check_versions()
    offsets = offsets_in_storage(tape, target)
    is_known = function is aten.copy_.default or function in stream.ELEMENTWISE
    if offsets is None or not is_known:
        return None
    # The overlap of the region and the target, in the indices of the target.
    bounds = [
        (max(first - offset, 0), min(end - offset, size))
        for (first, end), offset, size in zip(region, offsets, target.shape, strict=True)
    ]
    if any(first >= end for first, end in bounds):
        return values
    part = tuple(
        slice(first + offset - start, end + offset - start)
        for (first, end), offset, (start, _) in zip(bounds, offsets, region, strict=True)
    )
    is_all = all((each.start, each.stop) == (0, size) for each, size in zip(part, shape_of(region), strict=True))
    if function is aten.copy_.default:
        source: Any = entry.args[1]
        if not isinstance(source, Tensor) or source.shape != target.shape:
            return None
        new = _argument(tape, source, tuple(bounds), index, device)
        if new is None:
            return None
        if is_all:
            converted = new.tensor.to(target.dtype)
            return _Values(converted, new.is_owned or converted is not new.tensor)
        own = _owned(values)
        own.tensor[part].copy_(new.tensor)
        return own
    if meta_tensors(entry.args[1:], entry.kwargs):
        return None
    if any(isinstance(arg, Tensor) and arg.dim() > 0 for arg in entry.args[1:]):
        return None
    own = _owned(values)
    function(own.tensor[part], *entry.args[1:], **entry.kwargs)
    return own


def _owned(values: _Values) -> _Values:
    return values if values.is_owned else _Values(values.tensor.clone(), is_owned=True)


def _random(tape: Tape, base: Tensor, region: Region, device: torch.device) -> _Values | None:
    """Return a region of a randomly initialised tensor: a part, along the other dims, of the shard along one dim."""
    cut = [dim for dim, (part, size) in enumerate(zip(region, base.shape, strict=True)) if part != (0, size)]
    dim = min(cut, key=lambda each: (region[each][1] - region[each][0]) / base.shape[each], default=0)
    if base.dim() == 0:
        return None
    shard = stream.shard(tape, base, device, dim, region[dim][0], region[dim][1] - region[dim][0])
    if shard is None:
        return None
    rest = tuple(slice(None) if each == dim else slice(*region[each]) for each in range(base.dim()))
    return _Values(shard[rest], is_owned=True)
