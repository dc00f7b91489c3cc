"""Defers the tensors that code loads from files inside `deferred_init`: safetensors files and files of torch.save.

There, `safetensors.safe_open` and `torch.load` give deferred tensors in place of large ones. Code that loads
a checkpoint, such as transformers' `from_pretrained`, then reads only names, shapes and dtypes. When a deferred tensor
is materialized, it reads the elements of the shard from the memory-mapped file, and no others.
"""

from __future__ import annotations

import os
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch

from weft.strategy.deferred.tape import Entry, Tape, storage_of
from weft.strategy.deferred.tensor import DeferredTensor

Region = tuple[tuple[int, int], ...]  # the first index and the end (exclusive) in each dim


class FileTensor:
    """A tensor in a file, of which regions can be read.

    Args:
        shape: of the full tensor.
        dtype: of the tensor in the file.
        view: returns the elements that slices, one for each dim, select. Its result may be memory of the file.
    """

    num_bytes_read = 0  # by all objects of this process, in bytes of the file
    observers: ClassVar[list[Callable[[FileTensor, int], None]]] = []  # called with (tensor, bytes) after each read

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, view: Callable[[tuple[slice, ...]], Tensor]) -> None:
        self.shape, self.dtype = shape, dtype
        self._view = view

    @property
    def num_bytes(self) -> int:
        """The bytes of the full tensor in the file."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def read(self, region: Region) -> Tensor:
        """Return the elements of a region; the caller must not change them, because they may be memory of the file."""
        with no_dispatch(), torch.no_grad():
            values = self._view(tuple(slice(first, end) for first, end in region))
        FileTensor.num_bytes_read += values.nbytes
        for observer in FileTensor.observers:
            observer(self, values.nbytes)
        return values


def read_full(tensor: FileTensor) -> Tensor:
    """Return all elements of a tensor, in new memory."""
    return tensor.read(tuple((0, size) for size in tensor.shape)).clone(memory_format=torch.contiguous_format)


def deferred_of(tensor: FileTensor, tape: Tape) -> DeferredTensor:
    """Return a deferred tensor on the CPU with the values of a tensor in a file."""
    with no_dispatch():
        meta = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    tape.record(Entry(read_full, (tensor,), {}, meta, frozenset({storage_of(meta)})))
    return DeferredTensor(meta, tape, torch.device("cpu"))


def sources_of(tensor: DeferredTensor) -> list[FileTensor]:
    """Return the tensors in files on which the values of a deferred tensor depend."""
    entries = tensor.tape.needed([storage_of(tensor.meta)])
    return [entry.args[0] for entry in entries if entry.function is read_full]


def tensor_of_safetensors(handle: Any, name: str) -> FileTensor:
    """Return a tensor of an open safetensors file."""
    shape = tuple(handle.get_slice(name).get_shape())
    with no_dispatch():
        # An empty slice tells the dtype; a tensor without dims has no slices.
        like = handle.get_slice(name)[0:0] if shape else handle.get_tensor(name)
    if not shape:
        return FileTensor(shape, like.dtype, lambda _: like)
    return FileTensor(shape, like.dtype, lambda slices: handle.get_slice(name)[slices])


class _DeferringFile:
    """An open safetensors file whose large tensors are deferred; otherwise as the object of safetensors."""

    def __init__(self, handle: Any, tape: Tape, min_bytes: int, device: torch.device) -> None:
        self._handle, self._tape, self._min_bytes, self._device = handle, tape, min_bytes, device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)

    def __enter__(self) -> _DeferringFile:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the file open: deferred tensors read it later, and the last one closes it."""

    def get_tensor(self, name: str) -> Tensor:
        tensor = tensor_of_safetensors(self._handle, name)
        if tensor.num_bytes < self._min_bytes:
            with no_dispatch():
                return read_full(tensor).to(self._device)
        return deferred_of(tensor, self._tape).to(self._device)

    def get_tensors(self) -> dict[str, Tensor]:
        return {name: self.get_tensor(name) for name in self._handle.keys()}  # noqa: SIM118  (no mapping)

    def get_slice(self, name: str) -> _DeferringSlice:
        return _DeferringSlice(self, name)


class _DeferringSlice:
    """What `get_slice` of an open file returns: indexing it gives elements of a tensor."""

    def __init__(self, file: _DeferringFile, name: str) -> None:
        self._file, self._name = file, name
        self._slice = file._handle.get_slice(name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._slice, name)

    def __getitem__(self, index: Any) -> Tensor:
        return self._file.get_tensor(self._name)[index]


@contextmanager
def deferring_files(tape: Tape, min_bytes: int) -> Iterator[None]:
    """Inside, tensors of at least `min_bytes` that code loads from files are deferred, on the given tape."""
    previous = torch.load

    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        is_mappable = isinstance(f, (str, os.PathLike)) and zipfile.is_zipfile(f)
        if is_mappable and kwargs.get("mmap") is None and map_location in (None, "cpu", torch.device("cpu")):
            kwargs["mmap"] = True
        with no_dispatch():
            loaded = _LOAD(f, map_location, *args, **kwargs)
        return _with_deferred(loaded, tape, min_bytes, {}) if kwargs.get("mmap") else loaded

    with _patched_safe_open(tape, min_bytes):
        torch.load = load
        try:
            yield
        finally:
            torch.load = previous


_LOAD = torch.load


def _with_deferred(loaded: Any, tape: Tape, min_bytes: int, done: dict[int, Any]) -> Any:
    """Return what `torch.load` has loaded with deferred tensors, and copies of small ones, in place of mapped ones.

    Dicts and lists are changed in place, so that an OrderedDict keeps its attributes, such as `_metadata`.
    """
    if id(loaded) in done:
        return done[id(loaded)]
    result = done[id(loaded)] = loaded
    if isinstance(loaded, Tensor):
        result = done[id(loaded)] = _deferred_or_copied(loaded, tape, min_bytes)
    elif isinstance(loaded, (dict, list)):
        for key, value in list(loaded.items() if isinstance(loaded, dict) else enumerate(loaded)):
            loaded[key] = _with_deferred(value, tape, min_bytes, done)
    elif type(loaded) is tuple:
        result = tuple(_with_deferred(value, tape, min_bytes, done) for value in loaded)
    return result


def _deferred_or_copied(tensor: Tensor, tape: Tape, min_bytes: int) -> Tensor:
    is_plain = tensor.device.type == "cpu" and tensor.layout == torch.strided and not tensor.is_quantized
    if not is_plain or type(tensor) not in (Tensor, torch.nn.Parameter):
        return tensor
    values = tensor.detach()
    if tensor.nbytes < min_bytes:
        with no_dispatch():
            made = values.clone()
    else:
        made = deferred_of(FileTensor(tuple(values.shape), values.dtype, values.__getitem__), tape)
    return torch.nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else made


_tapes: list[tuple[Tape, int]] = []  # of the contexts that are active, each with its `min_bytes`
_original: list[Any] = []  # safetensors' own `safe_open`, once it has been replaced


@contextmanager
def _patched_safe_open(tape: Tape, min_bytes: int) -> Iterator[None]:
    """Replace `safe_open` in all modules that have imported it, such as transformers'."""
    try:
        from safetensors import safe_open
    except ImportError:
        yield
        return
    modules = list(sys.modules.values())
    patched = [each for each in modules if getattr(each, "__dict__", {}).get("safe_open") is safe_open]
    if not _original:
        _original.append(safe_open)
    _tapes.append((tape, min_bytes))
    for module in patched:
        module.__dict__["safe_open"] = _safe_open
    try:
        yield
    finally:
        _tapes.pop()
        for module in patched:
            module.__dict__["safe_open"] = safe_open


def _safe_open(filename: Any, framework: Any = "pt", device: Any = "cpu", **kwargs: Any) -> Any:
    """Open a safetensors file; as `safetensors.safe_open` outside of `deferred_init`.

    A module that is imported inside a `deferred_init` keeps this function.
    """
    [original] = _original
    if not _tapes or framework not in ("pt", "torch", "pytorch"):
        return original(filename, framework=framework, device=device, **kwargs)
    return _DeferringFile(original(filename, framework="pt", **kwargs), *_tapes[-1], torch.device(device))
