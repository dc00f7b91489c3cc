"""Which tokens of a sequence each rank of a context-parallel group has, and where they are in a tensor."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from weft.nn.shard import shard_range
from weft.strategy.context.groups import Grid

Order = Literal["head_tail", "contiguous"]
Interval = tuple[int, int]  # the first token, and the one after the last


@dataclasses.dataclass(frozen=True)
class SequenceLayout:
    """The tokens of each rank of a group.

    group_name: c10d name of the group.
    rank: this rank in the group.
    size: the number of tokens of the full sequence.
    intervals: for each rank, the tokens that it has, in ascending order.
    order: the order of `weft.ops.shard_sequence` that the intervals have, which the attention operators support; None:
        the layout is that of a slice of a sequence.
    grids: of the group, for attention that exchanges heads in some ranks and joins them in rings; () for others.
    """

    group_name: str
    rank: int
    size: int
    intervals: tuple[tuple[Interval, ...], ...]
    order: Order | None
    grids: tuple[Grid, ...] = ()

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.group_name, self.rank, self.size, self.intervals))

    @property
    def own(self) -> tuple[Interval, ...]:
        """Return the tokens of this rank."""
        return self.intervals[self.rank]

    @functools.cached_property
    def lengths(self) -> tuple[int, ...]:
        """Return the number of tokens of each rank."""
        return tuple(sum(stop - start for start, stop in own) for own in self.intervals)

    @functools.cached_property
    def own_length(self) -> int:
        return self.lengths[self.rank]

    @functools.lru_cache(maxsize=256)  # noqa: B019  (layouts are few, and equal ones share an entry)
    def sliced(self, start: int, stop: int) -> SequenceLayout:
        """Return the layout of the tokens from `start` to `stop`, which stay on their ranks."""
        intervals = tuple(
            tuple(
                (max(first, start) - start, min(last, stop) - start)
                for first, last in own
                if max(first, start) < min(last, stop)
            )
            for own in self.intervals
        )
        return dataclasses.replace(self, size=stop - start, intervals=intervals, order=None)

    def own_slice(self, start: int, stop: int) -> Interval:
        """Return the positions, in this rank's shard, of its tokens from `start` to `stop`."""
        before = sum(max(0, min(last, start) - first) for first, last in self.own)
        return before, before + self.sliced(start, stop).own_length

    def positions(self, device: torch.device) -> Tensor:
        """Return the positions of this rank's tokens in the full sequence, `[own_length]`, int64."""
        return self._kept(device, lambda: _positions(self.own, device))

    def gathered_rows(self, device: torch.device) -> Tensor | None:
        """Return, for each token, its row in the shards of all ranks padded to equal lengths and concatenated.

        None: the rows are in order already.
        """
        longest = max(self.lengths)
        if self.order == "contiguous" and self.size == longest * len(self.lengths):
            return None

        def make() -> Tensor:
            rows = torch.empty(self.size, dtype=torch.int64, device=device)
            for rank, own in enumerate(self.intervals):
                tokens = _positions(own, device)
                rows[tokens] = torch.arange(len(tokens), device=device) + rank * longest
            return rows

        return self._kept(("rows", device), make)

    def _kept(self, key: object, make: Callable[[], Tensor]) -> Tensor:
        """Return make(), or its earlier result; tensors without values, of a recording or a dry run, are not kept."""
        found = self._tensors.get(key)
        if found is None:
            found = make()
            if type(found) is Tensor:
                self._tensors[key] = found
        return found

    @functools.cached_property
    def _tensors(self) -> dict[object, Tensor]:
        return {}


def _positions(intervals: tuple[Interval, ...], device: torch.device) -> Tensor:
    if not intervals:
        return torch.empty(0, dtype=torch.int64, device=device)
    return torch.cat([torch.arange(start, stop, device=device) for start, stop in intervals])


@functools.lru_cache(maxsize=256)
def layout_of(
    size: int, group_name: str, num_ranks: int, rank: int, order: Order, grids: tuple[Grid, ...] = ()
) -> SequenceLayout:
    """Return the layout in which `weft.ops.shard_sequence` shards a sequence of `size` tokens."""
    num_chunks = 2 * num_ranks if order == "head_tail" else num_ranks
    chunks = [shard_range(size, num_chunks, chunk) for chunk in range(num_chunks)]
    intervals = [(start, start + length) for start, length in chunks]
    mine = [(r, num_chunks - 1 - r) if order == "head_tail" else (r,) for r in range(num_ranks)]
    return SequenceLayout(
        group_name,
        rank,
        size,
        tuple(tuple(intervals[c] for c in own if intervals[c][0] < intervals[c][1]) for own in mine),
        order,
        grids,
    )


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the tokens are in a tensor; made by `place_of`.

    Views may join the dim of the tokens with its neighbours: the size of `dim` is outer * layout.size * inner, as if
    dims of these three sizes had been flattened.
    """

    layout: SequenceLayout
    dim: int
    outer: int
    inner: int

    @functools.cached_property
    def full_size(self) -> int:
        """Return the size of `dim` in the full tensor."""
        return self.outer * self.layout.size * self.inner

    @functools.cached_property
    def own_size(self) -> int:
        """Return the size of `dim` in this rank's shard."""
        return self.outer * self.layout.own_length * self.inner

    @property
    def is_joined(self) -> bool:
        """Return whether `dim` has more than the tokens."""
        return (self.outer, self.inner) != (1, 1)

    def at(self, dim: int) -> Place:
        """Return the place with another dim."""
        return self if dim == self.dim else place_of(self.layout, dim, self.outer, self.inner)

    def full_shape(self, shard: Tensor) -> list[int]:
        """Return the shape of the full tensor of a shard."""
        shape = list(shard.shape)
        shape[self.dim] = self.full_size
        return shape

    def own_shape(self, full_shape: Sequence[int]) -> list[int]:
        """Return the shape of this rank's shard of a tensor."""
        shape = list(full_shape)
        shape[self.dim] = self.own_size
        return shape

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.layout, self.dim, self.outer, self.inner))


@functools.lru_cache(maxsize=4096)
def place_of(layout: SequenceLayout, dim: int, outer: int = 1, inner: int = 1) -> Place:
    """Return the place, usually the same object for the same arguments."""
    return Place(layout, dim, outer, inner)
