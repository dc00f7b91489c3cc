"""A ledger of tensors that have sizes but no values; counts by category and phase as `weft.memory` does."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from weft import _memory


class TensorLedger:
    """Holds a block for each storage of a tensor, from `hold` until the storage is freed; a `weft.memory` source.

    Phases, categories and peaks are those of the counter of a process, because the ledger is the same code.
    """

    def __init__(self) -> None:
        self._sizes = _memory.SizeLedger()
        self.phase = ""  # the current one
        self._blocks: dict[int, tuple[int, Any]] = {}  # by the storage's address: the block, a reference to the storage

    # ---- blocks --------------------------------------------------------------------------------------------

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Add blocks for storages that have none yet."""
        for tensor in tensors:
            storage = local_of(tensor).untyped_storage()
            if storage._cdata not in self._blocks:
                self._add(storage)

    def leave_out(self, tensor: Tensor) -> None:
        """Never add a block for the storage of a tensor, which has none yet."""
        storage = tensor.untyped_storage()
        key, block = storage._cdata, self._sizes.add(0)
        self._blocks[key] = block, weakref.ref(storage, functools.partial(self._free, key, block))

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        if num_bytes > 0:
            block = self._sizes.add(num_bytes)
            self._blocks[key] = block, weakref.ref(storage, functools.partial(self._free, key, block))

    def _free(self, key: int, block: int, _: Any = None) -> None:
        held = self._blocks.get(key)
        if held is not None and held[0] == block:
            del self._blocks[key]
            self._sizes.remove(block)

    def hold_briefly(self, num_bytes: int) -> None:
        """Add and remove a block: the temporaries of a call that is over."""
        if num_bytes > 0:
            self._sizes.remove(self._sizes.add(num_bytes))

    def set_shared_memory(self, num_bytes: int) -> None:
        """Set the bytes of the staging buffers into which this rank writes."""
        self._sizes.set_shared_memory(num_bytes)

    @contextlib.contextmanager
    def seeing_resizes(self, then: Callable[[int], None] = lambda _: None) -> Iterator[None]:
        """Inside, a storage whose size is changed by Python code, as FSDP2 does, gets a block of the new size.

        `then` is called with the new size.
        """
        original: Any = torch.UntypedStorage.resize_

        @functools.wraps(original)
        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            before = storage.nbytes()
            result = original(storage, size)
            if storage.nbytes() != before:
                if storage._cdata in self._blocks:
                    self._free(storage._cdata, self._blocks[storage._cdata][0])
                self._add(storage)
                then(storage.nbytes())
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]

    # ---- the functions of a source of `weft.memory` -----------------------------------------------------------

    def is_tracking(self) -> bool:
        return True

    def current(self) -> dict[str, int]:
        return self._sizes.current()

    def peak(self) -> dict[str, int]:
        return self._sizes.peak()

    def phases(self) -> list[tuple[str, float, dict[str, int]]]:
        return self._sizes.phases()

    def reset_peak(self) -> None:
        self._sizes.reset_peak()

    def begin_phase(self, name: str, category: str) -> None:
        self.phase = name
        self._sizes.begin_phase(name, category)

    def set_category(self, tensor: Tensor, category: str) -> bool:
        held = self._blocks.get(local_of(tensor).untyped_storage()._cdata)
        if held is None:
            return False
        self._sizes.set_category(held[0], category)
        return True

    def set_category_since(self, mark: int, from_: str, to: str) -> None:
        self._sizes.set_category_since(mark, from_, to)

    def mark(self) -> int:
        return self._sizes.mark()


def local_of(tensor: Tensor) -> Tensor:
    """Return the local shard of a DTensor, and other tensors unchanged."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
