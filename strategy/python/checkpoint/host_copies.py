"""Copies of tensors in CPU memory, which is kept from one save to the next."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGNMENT = 64  # bytes


class HostCopies:
    """Copies tensors into one buffer in CPU memory, which grows to the largest save, and is pinned if a tensor is CUDA.

    torch's own allocator of pinned memory would round its size up to a power of two, so CUDA pins the buffer in place.
    Forked processes, such as workers of a loader, do not inherit it: the kernel copies pinned memory at each fork.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._is_pinned = False

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the buffer."""
        return self._buffer.numel()

    def copy(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return contiguous copies; they are complete, and valid until the next call.

        Raises:
            RuntimeError: CUDA cannot pin the buffer.
        """
        starts, end = [], 0
        for tensor in tensors:
            starts.append(end)
            end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        on_cuda = {tensor.device for tensor in tensors if tensor.is_cuda}
        # The buffer is used by later saves, which may be outside of inference mode.
        with torch.inference_mode(False), torch.no_grad():
            if self.num_bytes < end or (on_cuda and not self._is_pinned):
                self._allocate(end, bool(on_cuda))
            copies = []
            for start, tensor in zip(starts, tensors, strict=True):
                num_bytes = math.prod(tensor.shape) * tensor.dtype.itemsize
                copy = self._buffer[start : start + num_bytes].view(tensor.dtype).view(tensor.shape)
                copies.append(copy.copy_(tensor, non_blocking=tensor.is_cuda))
        for device in on_cuda:
            torch.cuda.current_stream(device).synchronize()
        return copies

    def free(self) -> None:
        """Free the memory."""
        if self._is_pinned:
            torch.cuda.cudart().cudaHostUnregister(self._buffer.data_ptr())
        self._is_pinned = False
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")

    def _allocate(self, num_bytes: int, pins: bool) -> None:
        self.free()
        if not pins or num_bytes == 0:
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
            return
        memory = mmap.mmap(-1, num_bytes)
        if hasattr(mmap, "MADV_DONTFORK"):  # Linux
            memory.madvise(mmap.MADV_DONTFORK)
        buffer = torch.frombuffer(memory, dtype=torch.uint8)  # keeps `memory`
        error = int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), num_bytes, 0))
        if error != 0:
            raise RuntimeError(
                f"CUDA got {num_bytes} bytes of CPU memory to pin for the copies of a checkpoint, and cannot (error "
                f"{error}); free memory, or pass async_save=False."
            )
        self._buffer, self._is_pinned = buffer, True
