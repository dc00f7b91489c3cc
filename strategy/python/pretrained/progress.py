"""The progress of reading weights from files: the bytes read, of an estimate of the bytes to read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from weft.strategy.deferred import is_deferred
from weft.strategy.deferred.files import FileTensor, sources_of


class ReadProgress:
    """Counts the bytes that are read inside `follow`, and estimates their sum at the end.

    A rank's share of a tensor is known only when the tensor is sharded. The estimate assumes that this share is, of the
    tensors that are not read yet, the same as of the others. If each expected tensor is read, it is exact at the end.

    Args:
        show: called with (bytes read, bytes to read) after each read; both are 0 before the first `expect`.
    """

    def __init__(self, show: Callable[[int, int], None]) -> None:
        self._show = show
        self._seen: dict[int, FileTensor] = {}  # by id; it keeps the tensors, so that no other one gets an id
        self._open: dict[int, FileTensor] = {}  # by id: tensors of which nothing has been read
        self._num_open = 0  # bytes of these tensors in the files
        self._num_begun = 0  # bytes of the others
        self._num_read = 0

    @contextmanager
    def follow(self) -> Iterator[None]:
        """Inside, count all reads of this process."""
        FileTensor.observers.append(self._count)
        _active.append(self)
        try:
            yield
        finally:
            _active.remove(self)
            FileTensor.observers.remove(self._count)

    def expect(self, tensors: Iterable[FileTensor]) -> None:
        """Add tensors of which this rank will read its share."""
        for tensor in tensors:
            if id(tensor) not in self._seen:
                self._seen[id(tensor)] = self._open[id(tensor)] = tensor
                self._num_open += tensor.num_bytes

    def expect_module(self, module: nn.Module) -> None:
        """Add the tensors from which the deferred parameters and buffers of a module get their values."""
        for value in (*module.parameters(), *module.buffers()):
            local: Any = value._local_tensor if isinstance(value, DTensor) else value
            if is_deferred(local):
                self.expect(sources_of(local))

    @property
    def num_to_read(self) -> int:
        """The estimate of the bytes that will have been read at the end."""
        share = self._num_read / self._num_begun if self._num_begun else 1.0
        return self._num_read + round(self._num_open * share)

    def _count(self, tensor: FileTensor, num_bytes: int) -> None:
        if self._open.pop(id(tensor), None) is not None:
            self._num_open -= tensor.num_bytes
            self._num_begun += tensor.num_bytes
        elif id(tensor) not in self._seen:
            self._seen[id(tensor)] = tensor
            self._num_begun += tensor.num_bytes
        self._num_read += num_bytes
        self._show(self._num_read, self.num_to_read)


_active: list[ReadProgress] = []


def expect_reads(tensors: Iterable[FileTensor]) -> None:
    """Tell each `ReadProgress` that is inside `follow` which tensors will be read."""
    tensors = list(tensors)
    for progress in _active:
        progress.expect(tensors)
