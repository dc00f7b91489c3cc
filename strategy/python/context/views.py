"""Rules of views and of functions that rearrange dims."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft.strategy.context.elementwise import in_place_rule
from weft.strategy.context.layout import Place, layout_of, place_of
from weft.strategy.context.sharded_sequence import (
    GATHER,
    ShardedSequence,
    follow_shard,
    num_ranks_and_rank,
    redistributed,
    rule,
    shard,
    wrap,
)


def positive(dim: int, ndim: int) -> int:
    """Return a dim counted from the front."""
    return dim + ndim if dim < 0 else dim


def _sizes(args: Sequence[Any], kwargs: dict[str, Any], name: str = "size") -> list[int] | None:
    """Return the sizes that a function got as numbers or as one sequence; None: it got something else."""
    given: Any = args if args else (kwargs.get(name, kwargs.get("shape")),)
    if len(given) == 1 and isinstance(given[0], (tuple, list)):
        given = given[0]
    return [int(each) for each in given] if all(isinstance(each, int) for each in given) else None


# ---- shapes ------------------------------------------------------------------------------------------------


@rule(Tensor.view, Tensor.reshape, torch.reshape)
def _view(func: Any, args: Any, kwargs: Any) -> Any:
    x, sizes = args[0], _sizes(args[1:], kwargs, "shape")
    if not isinstance(x, ShardedSequence):
        return GATHER
    if sizes is None:  # a dtype
        return GATHER
    return reshape(x, sizes)


@rule(Tensor.view_as, Tensor.reshape_as)
def _view_as(func: Any, args: Any, kwargs: Any) -> Any:
    return reshape(args[0], list(args[1].shape)) if isinstance(args[0], ShardedSequence) else _like_shape(func, args)


def _like_shape(func: Any, args: Any) -> Tensor:
    """Call a function of a plain tensor and of the shape of a sequence."""
    made: Tensor = getattr(args[0], func.__name__.removesuffix("_as"))(args[1].shape)
    return made


@rule(Tensor.ravel, torch.ravel)
def _ravel(func: Any, args: Any, kwargs: Any) -> Any:
    return reshape(args[0], [-1])


@rule(torch.view_as_complex, torch.view_as_real)
def _view_of_complex(func: Any, args: Any, kwargs: Any) -> Any:
    """View pairs in the last dim as complex numbers, or complex numbers as pairs in a new last dim."""
    x = args[0]
    if func is torch.view_as_complex and x.place.dim == x.num_dims - 1:
        return GATHER
    return wrap(func(x.local), x.place)


@rule(Tensor.flatten, torch.flatten)
def _flatten(func: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    named = {"start_dim": 0, "end_dim": -1} | dict(zip(("start_dim", "end_dim"), args[1:], strict=False)) | kwargs
    start, end = positive(named["start_dim"], x.num_dims), positive(named["end_dim"], x.num_dims)
    if x.num_dims == 0 or start > end:
        return GATHER
    shape = list(x.shape)
    return reshape(x, [*shape[:start], math.prod(shape[start : end + 1]), *shape[end + 1 :]])


@rule(Tensor.unflatten, torch.unflatten)
def _unflatten(func: Any, args: Any, kwargs: Any) -> Any:
    named = dict(zip(("dim", "sizes"), args[1:], strict=False)) | kwargs
    x, sizes = args[0], _sizes((), named, "sizes")
    if sizes is None or not isinstance(named["dim"], int):
        return GATHER
    dim, shape = positive(named["dim"], x.num_dims), list(x.shape)
    if -1 in sizes:
        sizes = [shape[dim] // -math.prod(sizes) if each == -1 else each for each in sizes]
    return reshape(x, [*shape[:dim], *sizes, *shape[dim + 1 :]])


def reshape(x: ShardedSequence, sizes: list[int]) -> Any:
    """Return x with another shape, or GATHER if no dim of it has the tokens in their order."""
    found = _reshaped(x.place, tuple(x._local.shape), tuple(sizes))
    return GATHER if found is None else wrap(x.local.reshape(found[1]), found[0])


@functools.lru_cache(maxsize=4096)
def _reshaped(place: Place, own_shape: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[Place, list[int]] | None:
    """Return the place of the tokens in a tensor of other sizes, and the shape of this rank's shard of it."""
    shape = [*own_shape[: place.dim], place.full_size, *own_shape[place.dim + 1 :]]
    numel = math.prod(shape)
    if -1 in sizes:
        known = -math.prod(sizes)
        if known == 0 or sizes.count(-1) > 1:
            return None
        sizes = tuple(numel // known if each == -1 else each for each in sizes)
    if math.prod(sizes) != numel:
        return None  # torch's error then has the full shape
    num_tokens = place.layout.size
    before = math.prod(shape[: place.dim]) * place.outer
    after = math.prod(shape[place.dim + 1 :]) * place.inner
    for dim, size in enumerate(sizes):
        outside, inside = math.prod(sizes[:dim]), math.prod(sizes[dim + 1 :])
        if 0 in (outside, inside, size) or before % outside or after % inside:
            continue
        outer, inner = before // outside, after // inside
        if outer * num_tokens * inner == size:
            found = place_of(place.layout, dim, outer, inner)
            return found, found.own_shape(sizes)
    return None


@rule(Tensor.unsqueeze, torch.unsqueeze)
def _unsqueeze(func: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    dim = positive(args[1] if len(args) > 1 else kwargs["dim"], x.num_dims + 1)
    return wrap(x.local.unsqueeze(dim), x.place.at(x.place.dim + (dim <= x.place.dim)))


@rule(Tensor.squeeze, torch.squeeze)
def _squeeze(func: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    given = args[1] if len(args) > 1 else kwargs.get("dim", tuple(range(x.num_dims)))
    given = given if isinstance(given, (tuple, list)) else (given,)
    dims = [d for d in (positive(each, x.num_dims) for each in given) if x.shape[d] == 1]
    if x.place.dim in dims:
        return GATHER
    moved = x.place.at(x.place.dim - sum(d < x.place.dim for d in dims))
    return wrap(x.local.squeeze(tuple(dims)), moved)


@rule(Tensor.expand, Tensor.expand_as, Tensor.broadcast_to, torch.broadcast_to)
def _expand(func: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    if not isinstance(x, ShardedSequence):
        return _like_shape(func, args)
    sizes = list(args[1].shape) if func is Tensor.expand_as else _sizes(args[1:], kwargs)
    if sizes is None:
        return GATHER
    place = x.place.at(x.place.dim + len(sizes) - x.num_dims)
    if sizes[place.dim] not in (-1, place.full_size):
        return GATHER
    sizes[place.dim] = place.own_size
    return wrap(x.local.expand(sizes), place)


@rule(Tensor.repeat)
def _repeat(func: Any, args: Any, kwargs: Any) -> Any:
    x, counts = args[0], _sizes(args[1:], kwargs, "repeats")
    if counts is None:
        return GATHER
    place = x.place.at(x.place.dim + len(counts) - x.num_dims)
    return GATHER if counts[place.dim] != 1 else wrap(x.local.repeat(counts), place)


@rule(Tensor.repeat_interleave, torch.repeat_interleave)
def _repeat_interleave(func: Any, args: Any, kwargs: Any) -> Any:
    named = dict(zip(("repeats", "dim"), args[1:], strict=False)) | kwargs
    x, dim = args[0], named.get("dim")
    if not isinstance(named.get("repeats"), int) or dim is None or positive(dim, x.num_dims) == x.place.dim:
        return GATHER
    return wrap(func(x.local, *args[1:], **kwargs), x.place)


# ---- orders of dims ----------------------------------------------------------------------------------------


@rule(Tensor.transpose, torch.transpose, Tensor.swapaxes, Tensor.swapdims, torch.swapaxes, torch.swapdims)
def _transpose(func: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    first, second = (positive(each, x.num_dims) for each in (*args[1:], *kwargs.values()))
    order = list(range(x.num_dims))
    order[first], order[second] = order[second], order[first]
    return permute(x, order)


@rule(Tensor.t, torch.t, Tensor.T.__get__, Tensor.mT.__get__)  # type: ignore[attr-defined]
def _swap_last(func: Any, args: Any, kwargs: Any) -> Any:
    x, ndim = args[0], args[0].dim()
    if ndim != 2 and func != Tensor.mT.__get__:  # type: ignore[attr-defined]
        return GATHER
    return permute(x, [*range(ndim - 2), ndim - 1, ndim - 2])


@rule(Tensor.permute, torch.permute)
def _permute(func: Any, args: Any, kwargs: Any) -> Any:
    order = _sizes(args[1:], kwargs, "dims")
    return GATHER if order is None else permute(args[0], order)


@rule(Tensor.movedim, torch.movedim, Tensor.moveaxis, torch.moveaxis)
def _movedim(func: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    named = dict(zip(("source", "destination"), args[1:], strict=False)) | kwargs
    source, target = named["source"], named["destination"]
    sources = [positive(d, x.num_dims) for d in (source if isinstance(source, (tuple, list)) else (source,))]
    targets = [positive(d, x.num_dims) for d in (target if isinstance(target, (tuple, list)) else (target,))]
    rest = iter([dim for dim in range(x.num_dims) if dim not in sources])
    placed = dict(zip(targets, sources, strict=True))
    return permute(x, [placed[dim] if dim in placed else next(rest) for dim in range(x.num_dims)])


def permute(x: ShardedSequence, order: list[int]) -> ShardedSequence:
    order = [positive(each, x.num_dims) for each in order]
    made: ShardedSequence = wrap(x.local.permute(order), x.place.at(order.index(x.place.dim)))
    return made


# ---- parts -------------------------------------------------------------------------------------------------


@rule(Tensor.__getitem__)
def _getitem(func: Any, args: Any, kwargs: Any) -> Any:
    x, index = args
    if not isinstance(x, ShardedSequence):
        return GATHER
    items = list(index) if isinstance(index, tuple) else [index]
    if not _is_basic(items):
        return GATHER
    items, position = _item_of_tokens(x, items)
    new_dim = sum(each is None or type(each) is slice for each in items[:position])
    wanted = items[position]
    if type(wanted) is int:
        return _select(x, items, position, wanted)
    start, stop, step = wanted.indices(x.place.full_size)
    if (start, stop, step) == (0, x.place.full_size, 1):
        items[position] = slice(None)
        return wrap(x.local[tuple(items)], x.place.at(new_dim))
    if step != 1 or x.place.is_joined or stop <= start:
        return GATHER
    items[position] = slice(*x.place.layout.own_slice(start, stop))
    return wrap(x.local[tuple(items)], place_of(x.place.layout.sliced(start, stop), new_dim))


def _is_basic(items: list[Any]) -> bool:
    return all(each is None or each is Ellipsis or type(each) in (int, slice) for each in items)


def _item_of_tokens(x: ShardedSequence, items: list[Any]) -> tuple[list[Any], int]:
    """Return an index with an item for each dim, without Ellipsis, and the position of the item of the tokens."""
    num_dims = sum(each is not None and each is not Ellipsis for each in items)
    if Ellipsis in items:
        where = items.index(Ellipsis)
        items[where : where + 1] = [slice(None)] * (x.num_dims - num_dims)
    items += [slice(None)] * (x.num_dims - sum(each is not None for each in items))
    return items, [position for position, each in enumerate(items) if each is not None][x.place.dim]


@rule(Tensor.__setitem__)
def _setitem(func: Any, args: Any, kwargs: Any) -> Any:
    """Change a view of the shard."""
    x, index, value = args
    items = list(index) if isinstance(index, tuple) else [index]
    if not isinstance(x, ShardedSequence) or not _is_basic(items):
        return GATHER
    items, position = _item_of_tokens(x, items)
    if type(items[position]) is int:
        return GATHER
    part = _getitem(Tensor.__getitem__, (x, index), {})
    if part is GATHER:
        return GATHER
    if isinstance(value, Tensor):
        while value.dim() > part.num_dims and value.shape[0] == 1:
            value = value[0]
        changed = in_place_rule(Tensor.copy_, (part, value), {})
    else:
        changed = in_place_rule(Tensor.fill_, (part, value), {})
    if changed is GATHER:
        return GATHER
    return follow_shard(x)


@rule(Tensor.gather, torch.gather)
def _gather(func: Any, args: Any, kwargs: Any) -> Any:
    """Read elements along another dim than that of the tokens."""
    named = dict(zip(("input", "dim", "index"), args, strict=False)) | kwargs
    x, index = named["input"], named["index"]
    if not isinstance(x, ShardedSequence) or named.keys() - {"input", "dim", "index", "sparse_grad"}:
        return GATHER
    if positive(named["dim"], x.num_dims) == x.place.dim or (own := _like(index, x)) is None:
        return GATHER
    return wrap(torch.gather(x.local, named["dim"], own), x.place)


def _select(x: ShardedSequence, items: list[Any], position: int, token: int) -> Any:
    """Return one token, which is sent to all ranks."""
    size = x.place.layout.size
    if x.place.is_joined or not -size <= token < size:
        return GATHER
    token = positive(token, size)
    start, stop = x.place.layout.own_slice(token, token + 1)
    items[position] = slice(start, stop)
    kept = x.local.narrow(x.place.dim, start, stop - start)
    full: Tensor = ShardedSequence(kept, place_of(x.place.layout.sliced(token, token + 1), x.place.dim)).full()
    items[position] = 0
    return full[tuple(items)]


@rule(Tensor.select, torch.select)
def _select_of(func: Any, args: Any, kwargs: Any) -> Any:
    named = dict(zip(("input", "dim", "index"), args, strict=False)) | kwargs
    x, index = named["input"], named["index"]
    return x[tuple([slice(None)] * positive(named["dim"], x.num_dims) + [index])]


@rule(Tensor.narrow, torch.narrow)
def _narrow(func: Any, args: Any, kwargs: Any) -> Any:
    named = dict(zip(("input", "dim", "start", "length"), args, strict=False)) | kwargs
    x, dim, start, length = (named[name] for name in ("input", "dim", "start", "length"))
    if isinstance(start, Tensor):
        return GATHER
    start = positive(start, x.shape[dim])
    return x[tuple([slice(None)] * positive(dim, x.num_dims) + [slice(start, start + length)])]


@rule(Tensor.split, torch.split, Tensor.chunk, torch.chunk, Tensor.tensor_split, torch.tensor_split)
@rule(Tensor.unbind, torch.unbind)
def _split(func: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    takes_dim_only = func in (Tensor.unbind, torch.unbind)
    position = 1 if takes_dim_only else 2
    dim = positive(kwargs["dim"] if "dim" in kwargs else args[position] if len(args) > position else 0, x.num_dims)
    if dim == x.place.dim:
        return GATHER
    place = x.place.at(x.place.dim - 1) if takes_dim_only and dim < x.place.dim else x.place
    return wrap(func(x.local, *args[1:], **kwargs), place)


# ---- several tensors ---------------------------------------------------------------------------------------


@rule(torch.cat, torch.concat, torch.concatenate)
def _cat(func: Any, args: Any, kwargs: Any) -> Any:
    named = dict(zip(("tensors", "dim"), args, strict=False)) | kwargs
    # torch ignores empty tensors of one dim, with which caches of keys and values begin.
    tensors = [each for each in named["tensors"] if not (each.dim() == 1 and each.numel() == 0)]
    leader = next(each for each in tensors if isinstance(each, ShardedSequence))
    dim = positive(named.get("dim", 0), leader.num_dims)
    if "out" in named:
        return GATHER
    if len(tensors) == 1:
        return leader
    if dim != leader.place.dim:
        shards = [_like(each, leader) for each in tensors]
        return GATHER if any(each is None for each in shards) else wrap(torch.cat(shards, dim), leader.place)
    if leader.place.is_joined or leader.place.layout.order is None:
        return GATHER
    # A sequence with more tokens, such as one with a class token: it is sharded again.
    full = torch.cat([each.full() if isinstance(each, ShardedSequence) else each for each in tensors], dim)
    layout = leader.place.layout
    num_ranks, rank = num_ranks_and_rank(leader.place)
    assert layout.order is not None
    made = layout_of(full.shape[dim], layout.group_name, num_ranks, rank, layout.order, layout.grids)
    place = place_of(made, dim)
    return wrap(shard(full, place), place)


@rule(torch.stack)
def _stack(func: Any, args: Any, kwargs: Any) -> Any:
    named = dict(zip(("tensors", "dim"), args, strict=False)) | kwargs
    leader = next(each for each in named["tensors"] if isinstance(each, ShardedSequence))
    shards = [_like(each, leader) for each in named["tensors"]]
    if any(each is None for each in shards):
        return GATHER
    dim = positive(named.get("dim", 0), leader.num_dims + 1)
    return wrap(torch.stack(shards, dim), leader.place.at(leader.place.dim + (dim <= leader.place.dim)))


def _like(each: Tensor, leader: ShardedSequence) -> Any:
    """Return the shard of a tensor with the same number of tokens at the same dim; None if it has another."""
    place = leader.place
    if each.dim() != leader.num_dims or each.shape[place.dim] != place.full_size:
        return None
    if isinstance(each, ShardedSequence):
        return redistributed(each, place)
    return shard(each, place)
