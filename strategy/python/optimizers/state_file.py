"""A file on a disk that holds tensors, mapped into memory: the kernel reads and writes its pages as they are used."""

from __future__ import annotations

import mmap
import os
import tempfile
from dataclasses import dataclass

import torch
from torch import Tensor


class StateFile:
    """A file of a fixed size without a name, which disappears with the process; tensors take its space in turn.

    The pages of the file are in the page cache, which the kernel frees when memory is needed. They are not anonymous
    memory of the process (RssAnon).
    """

    def __init__(self, directory: str | os.PathLike[str], num_bytes: int) -> None:
        """
        Args:
            directory: is created if it does not exist.
            num_bytes: the size, above 0; `StateFile.size_of` returns the share of a tensor.

        Raises:
            OSError: the directory cannot be written to, or the disk has less space than this.
        """
        directory = os.path.expanduser(directory)
        try:
            os.makedirs(directory, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=directory, prefix="weft-states-")  # noqa: SIM115
        except OSError as error:
            raise OSError(
                error.errno,
                f"the directory '{os.fspath(directory)}' for optimizer states cannot be written to ({error.strerror}); "
                "pass another directory",
            ) from None
        try:
            # Reserves the space: without it, a write to a full disk would end the process by SIGBUS.
            os.posix_fallocate(self._file.fileno(), 0, num_bytes)
        except OSError as error:
            self._file.close()
            free = _free_bytes(directory)
            raise OSError(
                error.errno,
                f"the optimizer states need {num_bytes} bytes in '{os.fspath(directory)}', which has {free} free bytes "
                f"({error.strerror}); pass a directory on a disk with more space",
            ) from None
        self._map = mmap.mmap(self._file.fileno(), num_bytes)
        self._end = 0

    @staticmethod
    def size_of(tensor: Tensor, dtype: torch.dtype) -> int:
        """Return the bytes that a tensor of this many elements takes in a file: full pages."""
        return -(-tensor.numel() * dtype.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE

    def add(self, like: Tensor, dtype: torch.dtype) -> tuple[Tensor, Region]:
        """Return zeros of the shape and strides of a tensor, not empty, in the next pages of the file."""
        begin, size = self._end, self.size_of(like, dtype)
        flat = torch.frombuffer(self._map, dtype=dtype, count=like.numel(), offset=begin)
        self._end += size
        strides = torch.empty_like(like, device="meta").stride()  # those of `like`, if its elements are dense
        return flat.as_strided(like.shape, strides), Region(self, begin, size)

    def prefetch(self, begin: int, size: int) -> None:
        """Start to read a range of bytes from the disk, if it is not in memory."""
        self._map.madvise(mmap.MADV_WILLNEED, begin, size)

    def write_behind(self, begin: int, size: int) -> None:
        """Start to write a range of bytes to the disk, and unmap its pages, which then are the first to be freed."""
        self._map.madvise(mmap.MADV_DONTNEED, begin, size)  # a shared mapping loses nothing
        os.posix_fadvise(self._file.fileno(), begin, size, os.POSIX_FADV_DONTNEED)


@dataclass(frozen=True)
class Region:
    """The pages of one tensor in a file; without a file, for a tensor in memory, methods do nothing."""

    file: StateFile | None
    begin: int
    size: int

    def prefetch(self) -> None:
        if self.file is not None:
            self.file.prefetch(self.begin, self.size)

    def write_behind(self) -> None:
        if self.file is not None:
            self.file.write_behind(self.begin, self.size)


NO_REGION = Region(None, 0, 0)


def _free_bytes(directory: str | os.PathLike[str]) -> int:
    facts = os.statvfs(directory)
    return facts.f_bavail * facts.f_frsize
