"""Reads the directories that weft 0.1 and Lightning's ModelParallelStrategy have written, without running their code.

Their list of shards, `.metadata`, is a pickle of classes of torch.distributed.checkpoint. It is read by an unpickler
that knows these classes and no others, and values that are no tensors are loaded with `weights_only`.
"""

from __future__ import annotations

import enum
import io
import pickle
import re
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from weft.strategy.checkpoint.values import DTYPES_BY_NAME

LIST = ".metadata"
REST = "meta.pt"
_MODULE = "torch.distributed.checkpoint.metadata"  # of dataclasses and enums
_STORAGE_INFO = (_StorageInfo.__module__, "_StorageInfo")


def _enum_member(kind: Any, name: Any) -> Any:
    """Return the member `name` of an enum in a list of shards, which Python 3.11.0 to 3.11.3 pickles by getattr."""
    if isinstance(kind, enum.EnumMeta) and kind.__module__ == _MODULE and name in kind.__members__:
        return kind[name]
    raise ValueError("it refers to an attribute of an object, which no list of shards needs")


_OTHERS: dict[tuple[str, str], Any] = {
    ("builtins", "getattr"): _enum_member,
    _STORAGE_INFO: _StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("pathlib", "PosixPath"): Path,
    ("pathlib._local", "PosixPath"): Path,
    ("builtins", "set"): set,
}
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}")


class _Unpickler(pickle._Unpickler):
    """Knows the classes in a list of shards, and changes no other objects.

    pickle's version in Python: that in C allocates as much memory as an index in the file says.
    """

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _OTHERS:
            return _OTHERS[module, name]
        if module == "torch" and (dtype := DTYPES_BY_NAME.get(name)) is not None:
            return dtype
        if module == _MODULE:
            found = getattr(torch.distributed.checkpoint.metadata, name, None)
            if isinstance(found, type) and found.__module__ == module:
                return found
        raise ValueError(f"it refers to {module}.{name}, which no list of shards needs")

    def load_build(self) -> None:
        kind = type(self.stack[-2])  # type: ignore[attr-defined]
        if kind.__module__ != _MODULE and kind is not _StorageInfo:
            raise ValueError(f"it sets attributes of a {kind.__name__}")
        super().load_build()  # type: ignore[misc]

    dispatch: ClassVar[dict[int, Any]] = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: load_build}


class OldReader(dcp.FileSystemReader):
    """torch's reader of files, with the list of shards read by the restricted unpickler.

    allow_pickle: read the list as torch does, which runs any code in it.
    """

    def __init__(self, path: Path, allow_pickle: bool) -> None:
        super().__init__(path)
        self._allow_pickle = allow_pickle
        self._list: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the list; raises ValueError if it is not one, or names files outside of the directory."""
        if self._list is not None:
            return self._list
        if self._allow_pickle:
            self._list = super().read_metadata(*args, **kwargs)
            return self._list
        path = Path(self.path) / LIST
        try:
            with open(path, "rb") as file:
                metadata = _Unpickler(file).load()
            if not isinstance(metadata, Metadata):
                raise ValueError(f"it has a {type(metadata).__name__}")
            if type(metadata.storage_data) is not dict:
                raise ValueError("it has no dict of files")
            for info in metadata.storage_data.values():
                if type(info) is not _StorageInfo or type(info.relative_path) is not str:
                    raise ValueError("it has something else in place of a file")
                if not _FILE_NAME.fullmatch(info.relative_path):
                    raise ValueError(f"it names the file {info.relative_path!r:.80}")
        except FileNotFoundError:
            raise
        except Exception as error:  # a damaged pickle raises errors of all kinds
            raise ValueError(
                f"the checkpoint's list of shards {str(path)!r} cannot be used: {error}; load another checkpoint, or "
                "pass allow_pickle=True if you trust it."
            ) from None
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        self._list = metadata
        return metadata


class OldLoadPlanner(dcp.DefaultLoadPlanner):
    """torch's planner, which would unpickle values that are no tensors."""

    def __init__(self, allow_partial_load: bool, allow_pickle: bool) -> None:
        super().__init__(allow_partial_load=allow_partial_load)
        self._allow_pickle = allow_pickle

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        try:
            loaded = torch.load(value, map_location="cpu", weights_only=not self._allow_pickle)
        except pickle.UnpicklingError as error:
            raise ValueError(
                f"the checkpoint's value {name!r} has Python objects ({str(error).splitlines()[0]}); pass "
                "allow_pickle=True if you trust it."
            ) from None
        set_element(self.original_state_dict, self.mappings[name], loaded)


def read_rest(directory: Path, weights_only: bool | None) -> Any:
    """Return the entries of the file meta.pt; `weights_only`: as in `torch.load`.

    Raises:
        ValueError: it is damaged, or has Python objects that `weights_only` does not allow.
    """
    path = directory / REST
    try:
        return torch.load(path, map_location="cpu", weights_only=weights_only)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(
            f"the checkpoint's file {str(path)!r} is damaged or has Python objects ({str(error).splitlines()[0]}); "
            "load another checkpoint, or pass allow_pickle=True if you trust it."
        ) from None
