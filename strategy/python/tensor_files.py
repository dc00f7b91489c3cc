"""Writes files of safetensors, a tensor at a time.

Such a file begins with the length of its header, as 8 bytes in little-endian order, and the header: the dtype, shape
and range of bytes of each tensor, as JSON. The tensors follow without gaps (the format's description is in the README
of the repository safetensors).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from weft.strategy import durable

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ALIGNMENT = 8  # of the first tensor in a file


@dataclass(frozen=True)
class OutputTensor:
    """A tensor to be written: its name in the file, shape and dtype, and its `LazyTensor.group`."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    group: str = ""

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class OutputFile(Protocol):
    """A new file that is written from its first to its last byte."""

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""

    def close(self) -> None:
        """Complete the file; it is stored durably when this returns."""

    def discard(self) -> None:
        """Close the file without completing it."""


class TensorFile:
    """A safetensors file that is written a tensor at a time, in the order of `tensors`.

    Args:
        create: the path of a new file, or a function that creates one for a number of bytes.

    Attributes:
        header: the bytes before the first tensor.
        num_bytes: the size of the file when all tensors have been written.
    """

    def __init__(self, create: Path | Callable[[int], OutputFile], tensors: list[OutputTensor]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for tensor in tensors:
            end = offset + tensor.num_bytes
            header[tensor.name] = {
                "dtype": DTYPES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [offset, end],
            }
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        self.header = len(text).to_bytes(8, "little") + text
        self.num_bytes = len(self.header) + offset
        self._file = create(self.num_bytes) if callable(create) else durable.NewFile(create)
        try:
            self._file.write(self.header)
        except BaseException:
            self._file.discard()
            raise

    def write(self, tensor: Tensor) -> None:
        """Append the next tensor."""
        values = tensor.detach().cpu().contiguous()
        self.write_bytes(values.reshape(-1).view(torch.uint8).numpy().data)

    def write_bytes(self, data: memoryview) -> None:
        """Append the bytes of the next tensor."""
        self._file.write(data)

    def close(self) -> None:
        """Close the file when its bytes are stored durably."""
        self._file.close()

    def discard(self) -> None:
        """Close the file without completing it."""
        self._file.discard()
