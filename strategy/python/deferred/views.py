"""Maps regions through views of a deferred tensor: to the tensor that fills the storage, and back.

A region has a first index and an end (exclusive) in each dim. A view maps a region to one of the tensor that the view
was made of: a slice shifts it, a permutation permutes it, a reshape maps the smallest region around it that is a region
of both shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.strategy.deferred import stream
from weft.strategy.deferred.files import Region
from weft.strategy.deferred.tape import Entry, Tape, meta_tensors, storage_of

aten = torch.ops.aten

_Restore = Callable[[Tensor], Tensor]


def full_region(shape: torch.Size) -> Region:
    return tuple((0, size) for size in shape)


def shape_of(region: Region) -> list[int]:
    return [end - first for first, end in region]


def in_storage(tape: Tape, meta: Tensor, region: Region) -> tuple[Tensor, Region, _Restore] | None:
    """Map a region of a view to one of the tensor that fills its storage.

    Returns:
        The tensor, its region, and a function that turns the elements of that region into those of the given one.
    """
    restores: list[_Restore] = []
    while True:
        entry = tape.producer_of(meta)
        if entry is None:
            return None
        if entry.function not in stream.VIEWS:
            if entry is not tape.entries_of(storage_of(meta))[0]:
                return None  # a view of another kind
            break
        step = _to_parent(entry, meta, region)
        if step is None:
            return None
        meta, region, restore = step
        restores.append(restore)

    def restore_all(tensor: Tensor) -> Tensor:
        for restore in reversed(restores):
            tensor = restore(tensor)
        return tensor

    fills_storage = meta.untyped_storage().nbytes() == meta.numel() * meta.element_size()
    return (meta, region, restore_all) if fills_storage else None


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _to_parent(entry: Entry, child: Tensor, region: Region) -> tuple[Tensor, Region, _Restore] | None:
    """Map a region of a view to one of the tensor that the view was made of; None for views without a rule."""
    function = entry.function
    parent: Tensor = entry.args[0]
    args = entry.args[1:]
    if function in (aten.detach.default, aten.alias.default):
        return parent, region, _same
    if function in (aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default, aten.select.int):
        offset = _offset(entry, child)
        if offset is None:
            return None
        dim, first = offset
        if function is aten.select.int:
            return parent, (*region[:dim], (first, first + 1), *region[dim:]), lambda tensor: tensor.squeeze(dim)
        moved = (region[dim][0] + first, region[dim][1] + first)
        return parent, (*region[:dim], moved, *region[dim + 1 :]), _same
    if function is aten.unbind.int:
        dim = (args[0] if args else 0) % parent.dim()
        index = _position(entry, child)
        return parent, (*region[:dim], (index, index + 1), *region[dim:]), lambda tensor: tensor.squeeze(dim)
    order = _permutation(function, args, parent.dim())
    if order is not None:
        back = [order.index(dim) for dim in range(parent.dim())]
        return parent, tuple(region[back[dim]] for dim in range(parent.dim())), lambda tensor: tensor.permute(order)
    if function is aten.unsqueeze.default:
        dim = args[0] % child.dim()
        return parent, (*region[:dim], *region[dim + 1 :]), lambda tensor: tensor.unsqueeze(dim)
    if function in (aten.view.default, aten._unsafe_view.default):
        wide, reshaped = _reshaped(region, child.shape, parent.shape)
        part = tuple(slice(first - start, end - start) for (first, end), (start, _) in zip(region, wide, strict=True))
        return parent, reshaped, lambda tensor: tensor.reshape(shape_of(wide))[part]
    return None


def _offset(entry: Entry, child: Tensor) -> tuple[int, int] | None:
    """Return (dim, first index) of the part of a tensor that a slice, split or select is."""
    function, args, parent = entry.function, entry.args[1:], entry.args[0]
    if entry.kwargs:
        return None
    if function is aten.slice.Tensor:
        defaults: tuple[Any, ...] = (0, None, None, 1)
        dim, start, _, step = (*args, *defaults[len(args) :])
        if step != 1:
            return None
        dim, size = dim % parent.dim(), parent.shape[dim]
        start = 0 if start is None else start
        return dim, min(max(start + size if start < 0 else start, 0), size)
    if function is aten.select.int:
        dim, index = args
        return dim % parent.dim(), index % parent.shape[dim]
    dim = (args[1] if len(args) > 1 else 0) % parent.dim()
    before = meta_tensors(entry.result)[: _position(entry, child)]
    return dim, sum(part.shape[dim] for part in before)


def _position(entry: Entry, child: Tensor) -> int:
    return next(index for index, each in enumerate(meta_tensors(entry.result)) if each is child)


def _permutation(function: Any, args: tuple[Any, ...], num_dims: int) -> list[int] | None:
    """Return the dims of the parent in the order of the view's; None for calls that do not permute."""
    order = list(range(num_dims))
    if function is aten.t.default:
        return order[::-1]
    if function is aten.transpose.int:
        first, second = (dim % num_dims for dim in args)
        order[first], order[second] = second, first
        return order
    if function is aten.permute.default:
        return [dim % num_dims for dim in args[0]]
    return None


def _reshaped(region: Region, shape: torch.Size, new_shape: torch.Size) -> tuple[Region, Region]:
    """Map a region through a reshape of a tensor that is not empty.

    The dims are taken in the smallest groups with equal products; each group is mapped by `_reshaped_group`.

    Returns:
        The smallest region around the given one that is a region of the new shape, too; and that one.
    """
    wide: list[tuple[int, int]] = []
    result: list[tuple[int, int]] = []
    old, new = 0, 0
    while old < len(shape) or new < len(new_shape):
        first_old, first_new = old, new
        size_old = size_new = 1
        if old < len(shape):
            size_old, old = shape[old], old + 1
        if new < len(new_shape):
            size_new, new = new_shape[new], new + 1
        while size_old != size_new:
            if size_old < size_new:
                size_old, old = size_old * shape[old], old + 1
            else:
                size_new, new = size_new * new_shape[new], new + 1
        around, mapped = _reshaped_group(region[first_old:old], shape[first_old:old], new_shape[first_new:new])
        wide += around
        result += mapped
    return tuple(wide), tuple(result)


def _reshaped_group(
    region: Region, shape: torch.Size, new_shape: torch.Size
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Map a region of one group of dims: see `_reshaped`.

    In both shapes, the mapped region is a range of the first dim that is not 1, and full in the others. So the ends of
    the range, in elements, are multiples of both shapes' inner sizes.
    """
    full, new_full = ([(0, size) for size in each] for each in (shape, new_shape))
    outer, new_outer = (next((dim for dim, size in enumerate(each) if size != 1), None) for each in (shape, new_shape))
    if outer is None or new_outer is None or tuple(full) == region:
        return full, new_full
    inner, new_inner = math.prod(shape[outer + 1 :]), math.prod(new_shape[new_outer + 1 :])
    unit = math.lcm(inner, new_inner)
    first = region[outer][0] * inner // unit * unit
    end = min(-(-region[outer][1] * inner // unit) * unit, math.prod(shape))
    full[outer] = (first // inner, end // inner)
    new_full[new_outer] = (first // new_inner, end // new_inner)
    return full, new_full


def offsets_in_storage(tape: Tape, meta: Tensor) -> list[int] | None:
    """Return the first index, in each dim, of a view that is a box of the tensor that fills the storage."""
    offsets = [0] * meta.dim()
    while True:
        entry = tape.producer_of(meta)
        if entry is None:
            return None
        if entry.function not in stream.VIEWS:
            return offsets if entry is tape.entries_of(storage_of(meta))[0] else None
        if entry.function in (aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default):
            offset = _offset(entry, meta)
            if offset is None:
                return None
            offsets[offset[0]] += offset[1]
        elif entry.function not in (aten.detach.default, aten.alias.default):
            return None
        meta = entry.args[0]
