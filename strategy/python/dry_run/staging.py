"""The pages of shared memory into which a rank writes in the collectives and messages of the backend weft.

The sizes and the order of buffers are those of ops/collectives/core: shared_state.cpp, collective.cpp, exchanges.cpp
and reductions.cpp; those of messages are in ring.cpp and messages.cpp.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

_PAGE = 4096
_LIMIT_BYTES = 16 << 20  # of a group, the default of `BackendOptions`
_ONE_SHOT_BYTES = 16 * 1024  # an all-reduce of more bytes is a reduce-scatter and an all-gather
_STREAMED_BYTES = 4 << 20
_HEADER_BYTES = 32  # of a frame in a ring
_EAGER_BYTES = _PAGE - _HEADER_BYTES  # a message of more bytes passes through the ring in chunks
_RING_HEADER_BYTES = 128


class GroupStaging:
    """The two staging buffers of a rank in a group of `num_ranks`."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        least = _round_up(2 * 64 * num_ranks, _PAGE)
        share = _LIMIT_BYTES // 2 // (2 * num_ranks) // 128 * 128
        self._buffer_bytes = min(max(share, least), max(least, 1 << 20))
        self._buffer = 0  # of the next collective's first chunk
        self._pages: set[int] = set()
        rings = _LIMIT_BYTES // 4 // max(1, num_ranks * (num_ranks - 1)) // 128 * 128
        self._ring_bytes = min(max(rings, _PAGE), 256 << 10)
        self._written: dict[int, int] = {}  # bytes that this rank has written so far into its ring to each peer

    @property
    def num_bytes(self) -> int:
        rings = (_RING_HEADER_BYTES + min(each, self._ring_bytes) for each in self._written.values())
        return len(self._pages) * _PAGE + sum(_round_up(each, _PAGE) for each in rings)

    def send(self, num_bytes: int, peer: int) -> None:
        """A message to a peer: an announcement and, unless it contains the data, chunks that the peer has granted."""
        if num_bytes <= _EAGER_BYTES:
            self._write_frame(num_bytes, peer)
            return
        chunk = self._ring_bytes // 4 - _HEADER_BYTES
        self._write_frame(0, peer)
        for first in range(0, num_bytes, chunk):
            self._write_frame(min(chunk, num_bytes - first), peer)

    def receive(self, num_bytes: int, peer: int) -> None:
        """A message from a peer, which is granted if it does not come with its announcement."""
        if num_bytes > _EAGER_BYTES:
            self._write_frame(0, peer)

    def _write_frame(self, payload_bytes: int, peer: int) -> None:
        self._written[peer] = self._written.get(peer, 0) + _HEADER_BYTES + _round_up(payload_bytes, _HEADER_BYTES)

    def all_reduce(self, num_bytes: int) -> None:
        in_segments = num_bytes > _ONE_SHOT_BYTES
        is_whole = num_bytes <= self._buffer_bytes
        size = self._buffer_bytes if is_whole else self._buffer_bytes // 2
        last = 0
        for chunk, first in self._chunks(num_bytes, size):
            last = self._half(chunk, 3 if in_segments else 2)
            self._touch(last, 0, min(size, num_bytes - first))
        self._end(last)

    def exchange(self, num_bytes: int, writes: bool = True) -> None:
        """An all-gather, a broadcast or a gather of `num_bytes` of each rank, or of the root; 0: a barrier."""
        size = self._buffer_bytes // 2
        last = 0
        for chunk, first in self._chunks(num_bytes, size):
            last = self._half(chunk, 2)
            if writes:
                self._touch(last, 0, min(size, num_bytes - first))
        self._end(last)

    def reduce_scatter(self, segment_bytes: int) -> None:
        total = segment_bytes * self._num_ranks
        alternates = self._num_ranks > 4 and total >= 2 * _STREAMED_BYTES
        size = self._buffer_bytes if alternates else self._buffer_bytes // 2
        slot = min(max(64, _round_up(segment_bytes, 64)), size // self._num_ranks // 64 * 64)
        last = 0
        for chunk, first in self._chunks(segment_bytes, slot):
            last = 2 * ((self._buffer + chunk) % 2) if alternates else self._half(chunk, 2)
            for peer in range(self._num_ranks - 1):
                self._touch(last, peer * slot, min(slot, segment_bytes - first))
        self._end(last)

    def all_to_all(self, sizes: Sequence[int], rank: int) -> None:
        """An exchange by `rank`, which sends sizes[r] bytes to rank r; those for itself are not staged."""
        slot = self._buffer_bytes // 2 // self._num_ranks // 64 * 64
        last = 0
        for chunk, first in self._chunks(max(sizes), slot):
            last = self._half(chunk, 2)
            for peer, num_bytes in enumerate(sizes):
                if peer != rank:
                    self._touch(last, peer * slot, min(slot, num_bytes - first))
        self._end(last)

    @staticmethod
    def _chunks(num_bytes: int, size: int) -> Iterator[tuple[int, int]]:
        """Yield the number and the first byte of each chunk; there is at least one."""
        return enumerate(range(0, max(1, num_bytes), size))

    def _half(self, chunk: int, num_halves: int) -> int:
        return (2 * self._buffer + chunk % num_halves) % 4

    def _touch(self, half: int, first: int, num_bytes: int) -> None:
        begin = half * (self._buffer_bytes // 2) + first
        if num_bytes > 0:
            self._pages.update(range(begin // _PAGE, (begin + num_bytes - 1) // _PAGE + 1))

    def _end(self, half: int) -> None:
        self._buffer = 1 - half // 2


class Staging:
    """The staging buffers of all groups of a rank."""

    def __init__(self) -> None:
        self._groups: dict[str, GroupStaging] = {}

    def group(self, name: str, num_ranks: int) -> GroupStaging:
        if name not in self._groups:
            self._groups[name] = GroupStaging(num_ranks)
        return self._groups[name]

    @property
    def num_bytes(self) -> int:
        return sum(group.num_bytes for group in self._groups.values())


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
