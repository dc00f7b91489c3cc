"""manifest.json: the tensors and values in the files of a checkpoint, with checksums.

It is written last, so a directory with a manifest is complete. Its first line has the checksum of all bytes after that
line:

    {"checksum": "2d06800538d394c2",
    "format": "weft checkpoint", "version": 1, ...,
    "files": {"rank-00000.safetensors": {"num_bytes": 4096, "header_bytes": 512, "header_checksum": "..."}},
    "tensors": {"model.layer.weight": {"path": ["model", "layer.weight"], "dtype": "float32", "shape": [8, 16],
                "chunks": [{"offsets": [0, 0], "shape": [4, 16], "file": "rank-00000.safetensors", "start": 512,
                            "panels": 1, "block_rows": 4, "table": 0, "checksum": "..."}]}},
    "values": {"optimizer_0.param_groups.0.lr": {"path": [...], "value": 0.1}},
    "rest": {...}}

The checksums of a chunk's blocks are a table in the chunk's file, and the manifest has the checksum of the table; of a
chunk with one block, the manifest has the checksum of the block.

A manifest may come from anywhere. `Manifest.read` accepts only one whose tensors are exactly covered by their chunks,
and whose files are exactly covered by their headers and chunks. So no size in it leads to more memory than the files
have, and no byte of the files is without a checksum.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from weft.strategy.checkpoint.blocks import ALGORITHM, CHECKSUM_BYTES, Blocks, checksum
from weft.strategy.checkpoint.file_names import MANIFEST, is_of_objects, may_be_listed
from weft.strategy.checkpoint.locations import Location, Where, location_of, path_in
from weft.strategy.checkpoint.values import dtype_of

_BEGINNING = re.compile(rb'\{"checksum": "[0-9a-f]{16}",\n"format":"weft checkpoint"')
_FORMAT = "weft checkpoint"
VERSION = 1
_PREFIX = b'{"checksum": "%016x",\n'
_PREFIX_BYTES = len(_PREFIX % 0)
_MAX_CHUNKS = 1 << 16  # of a tensor; more than ranks write
_MAX_SPLIT_DIMS = 6
_MAX_PATH = 100  # keys


def has_manifest(directory: Where) -> bool:
    """Return whether a directory or URL has a manifest of weft, not another file of that name, by how it begins."""
    try:
        return _BEGINNING.match(location_of(directory).read(MANIFEST, 100)) is not None
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return False


@dataclass(frozen=True)
class StoredFile:
    """A file of a checkpoint.

    Attributes:
        num_bytes: its size.
        header_bytes: of the header, which no tensor covers; the full size if the file has no tensors.
        header_checksum: of these bytes.
    """

    num_bytes: int
    header_bytes: int
    header_checksum: int


@dataclass(frozen=True)
class StoredChunk:
    """A part of a tensor in a file.

    Attributes:
        offsets: the first index in each dim of the tensor.
        start: the first byte in the file.
        table: the first byte of the blocks' checksums in the file; 0 for a chunk with one block or none.
        checksum: of this table, or of the only block.
    """

    offsets: tuple[int, ...]
    file: str
    start: int
    blocks: Blocks
    table: int
    checksum: int

    @property
    def table_bytes(self) -> int:
        return self.blocks.num_blocks * CHECKSUM_BYTES if self.blocks.num_blocks > 1 else 0

    @property
    def shape(self) -> tuple[int, ...]:
        return self.blocks.shape


@dataclass(frozen=True)
class StoredTensor:
    """A tensor; `path`: its keys in the nested state."""

    path: tuple[str | int, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class StoredValue:
    """A value that is no tensor, encoded by `values.Encoder`; `path`: its keys in the nested state."""

    path: tuple[str | int, ...]
    encoded: Any


@dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint.

    Attributes:
        about: versions, mesh and plan, for people and `weft inspect`; JSON.
        tensors, values: the entries of the sharded state, by name.
        rest: the other entries, encoded by `values.Encoder`.
        rest_tensors: the tensors in `rest` and in `values`.
        object_paths: the path of each object in OBJECTS, by index.
    """

    about: dict[str, Any]
    files: dict[str, StoredFile]
    tensors: dict[str, StoredTensor]
    values: dict[str, StoredValue] = field(default_factory=dict)
    rest: Any = None
    rest_tensors: tuple[StoredTensor, ...] = ()
    object_paths: tuple[str, ...] = ()

    @property
    def objects_file(self) -> str | None:
        """Return the name of the file with the pickled objects."""
        return next(filter(is_of_objects, self.files), None)

    def to_bytes(self) -> bytes:
        """Return the content of the file."""
        content = {
            "format": _FORMAT,
            "version": VERSION,
            "algorithm": ALGORITHM,
            "about": self.about,
            "files": {name: file_to_json(file) for name, file in self.files.items()},
            "tensors": {name: _tensor_to_json(tensor) for name, tensor in self.tensors.items()},
            "values": {name: {"path": list(v.path), "value": v.encoded} for name, v in self.values.items()},
            "rest": self.rest,
            "rest_tensors": [_tensor_to_json(tensor) for tensor in self.rest_tensors],
            "objects": list(self.object_paths),
        }
        text = json.dumps(content, separators=(",", ":"), allow_nan=False).encode()[1:]
        return _PREFIX % checksum(text) + text

    @classmethod
    def read(cls, directory: Where) -> Manifest:
        """Return the manifest of a directory or URL.

        Raises:
            FileNotFoundError: there is none.
            ValueError: it is damaged, does not agree with the files, or is of a later version of the format.
        """
        location = location_of(directory)
        return cls.from_bytes(location.read(MANIFEST), location)

    @classmethod
    def from_bytes(cls, data: bytes, location: Location) -> Manifest:
        """Return the manifest of the files at a location; raises ValueError as `read` does."""
        try:
            manifest = cls._from_json(_content(data))
            manifest._check(location)
        except RecursionError:
            raise ValueError(_sentence(location, "its values are nested too deeply")) from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            reason = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
            raise ValueError(_sentence(location, reason)) from None
        return manifest

    @classmethod
    def _from_json(cls, content: dict[str, Any]) -> Manifest:
        return cls(
            about=_about(content["about"]),
            files={name: file_from_json(file) for name, file in _typed(content["files"], dict).items()},
            tensors={name: _tensor_from_json(t) for name, t in _typed(content["tensors"], dict).items()},
            values={
                name: StoredValue(_path(value["path"]), value["value"])
                for name, value in _typed(content["values"], dict).items()
            },
            rest=content["rest"],
            rest_tensors=tuple(_tensor_from_json(tensor) for tensor in _typed(content["rest_tensors"], list)),
            object_paths=tuple(_typed(path, str) for path in _typed(content["objects"], list)),
        )

    def all_tensors(self) -> Iterator[tuple[str, StoredTensor]]:
        """Yield the tensors of the state and of the other entries, each with a name."""
        yield from self.tensors.items()
        for idx, tensor in enumerate(self.rest_tensors):
            yield f"tensor {idx} of the other entries", tensor

    def _check(self, location: Location) -> None:
        chunks: dict[str, list[StoredChunk]] = {name: [] for name in self.files}
        for name, tensor in self.all_tensors():
            _check_sizes(name, tensor)
            for chunk in tensor.chunks:
                if chunk.file not in chunks:
                    raise ValueError(f"{name!r:.200} is in the file {chunk.file!r:.80}, which is not listed")
                chunks[chunk.file].append(chunk)
        for name in self.files:
            if not may_be_listed(name):
                raise ValueError(f"it lists the file {name!r:.80}, which is no name of a checkpoint's file")
        sizes = location.sizes(self.files)
        for name, file in self.files.items():
            if name not in sizes:
                raise ValueError(f"the file {name!r} is missing")
            if sizes[name] != file.num_bytes:
                raise ValueError(f"the file {name!r} has {sizes[name]} bytes, and {file.num_bytes} are expected")
            regions = [(chunk.start, chunk.blocks.num_bytes) for chunk in chunks[name]]
            regions += [(chunk.table, chunk.table_bytes) for chunk in chunks[name] if chunk.table_bytes > 0]
            end = file.header_bytes
            for start, num_bytes in sorted(regions):
                if start != end:
                    raise ValueError(f"the file {name!r} has a gap or an overlap at byte {min(end, start)}")
                end += num_bytes
            if end != file.num_bytes:
                raise ValueError(f"the file {name!r} has {file.num_bytes} bytes, and its tensors end at byte {end}")
        for name, tensor in self.all_tensors():
            _check_overlap(name, tensor)
        self._check_paths()
        if int(len(self.object_paths) > 0) != sum(map(is_of_objects, self.files)):
            raise ValueError("the files of objects and the list of objects do not agree")

    def _check_paths(self) -> None:
        """Raise ValueError unless the paths are those of a nested state, and fit the names."""
        paths = [(name, tensor.path) for name, tensor in self.tensors.items()]
        paths += [(name, value.path) for name, value in self.values.items()]
        holders = {path[:end] for _, path in paths for end in range(1, len(path))}
        if len({path for _, path in paths}) < len(paths):
            raise ValueError("two entries have one path")
        for name, path in paths:
            if not path or ".".join(map(str, path)) != name or path in holders:
                raise ValueError(f"the entry {name!r:.200} has the path {list(path)!r:.200}")


def _sentence(location: Location, reason: str) -> str:
    return (
        f"the checkpoint's manifest {path_in(location, MANIFEST)!r} cannot be used: {reason}; load another checkpoint."
    )


def _content(data: bytes) -> dict[str, Any]:
    """Return the JSON of a manifest after its checksum has been compared."""
    rest = memoryview(data)[_PREFIX_BYTES:]
    if data[:_PREFIX_BYTES] != _PREFIX % checksum(rest):
        raise ValueError("its checksum differs, so it is damaged")
    content = json.loads(data, object_pairs_hook=_without_duplicates, parse_constant=_no_constant)
    if _typed(content, dict).get("format") != _FORMAT:
        raise ValueError("it has another format")
    if content["version"] != VERSION or content["algorithm"] != ALGORITHM:
        raise ValueError(
            f"it has version {content['version']!r:.20} and checksums {content['algorithm']!r:.20}, and this weft "
            f"reads version {VERSION} and {ALGORITHM}"
        )
    return dict(content)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name occurs twice")
    return result


def _no_constant(text: str) -> Any:
    raise ValueError(f"it has the number {text}")


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"it has {value!r:.50} in place of a {kind.__name__}")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 64:
        raise ValueError(f"it has {value!r:.50} in place of a count")
    return value


def _counts(values: Any) -> tuple[int, ...]:
    return tuple(_count(value) for value in _typed(values, list))


def _checksum(text: Any) -> int:
    if not re.fullmatch("[0-9a-f]{16}", _typed(text, str)):
        raise ValueError(f"it has {text!r:.50} in place of a checksum")
    return int(text, 16)


def file_to_json(file: StoredFile) -> dict[str, Any]:
    """Return what describes a file, for `file_from_json`."""
    return {
        "num_bytes": file.num_bytes,
        "header_bytes": file.header_bytes,
        "header_checksum": f"{file.header_checksum:016x}",
    }


def file_from_json(content: Any) -> StoredFile:
    """Return the file; raises ValueError for other content."""
    if _typed(content, dict).keys() != {"num_bytes", "header_bytes", "header_checksum"}:
        raise ValueError(f"it describes a file by {list(content)!r:.80}")
    num_bytes, header_bytes = _count(content["num_bytes"]), _count(content["header_bytes"])
    return StoredFile(num_bytes, header_bytes, _checksum(content["header_checksum"]))


def _about(content: Any) -> dict[str, Any]:
    """Return the description of the run: texts, and the sizes of the mesh."""
    about = dict(_typed(content, dict))
    for name, value in about.items():
        sizes = _typed(value, dict).values() if name == "mesh" else ()
        if any(type(size) is not int for size in sizes) or (name != "mesh" and type(value) is not str):
            raise ValueError(f"it has {value!r:.50} as {name!r:.50}")
    return about


def _path(keys: Any) -> tuple[str | int, ...]:
    if not all(type(key) is str or (type(key) is int and 0 <= key < 1 << 30) for key in _typed(keys, list)):
        raise ValueError(f"it has the path {keys!r:.50}")
    if len(keys) > _MAX_PATH:
        raise ValueError(f"it has a path of {len(keys)} keys")
    return tuple(keys)


def _tensor_to_json(tensor: StoredTensor) -> dict[str, Any]:
    return {
        "path": list(tensor.path),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "chunks": [chunk_to_json(chunk) for chunk in tensor.chunks],
    }


def chunk_to_json(chunk: StoredChunk) -> dict[str, Any]:
    """Return what describes a chunk, for `chunk_from_json`."""
    return {
        "offsets": list(chunk.offsets),
        "shape": list(chunk.shape),
        "file": chunk.file,
        "start": chunk.start,
        "panels": chunk.blocks.num_panels,
        "block_rows": chunk.blocks.block_rows,
        "table": chunk.table,
        "checksum": f"{chunk.checksum:016x}",
    }


def chunk_from_json(content: Any, itemsize: int) -> StoredChunk:
    """Return the chunk of a tensor whose elements have `itemsize` bytes; raises ValueError for other content."""
    shape, panels, block_rows = _counts(content["shape"]), _count(content["panels"]), _count(content["block_rows"])
    blocks = Blocks(shape, itemsize, panels, block_rows)
    if panels == 0 or blocks.num_columns % panels or block_rows == 0:
        raise ValueError(f"it has a chunk of {list(shape)!r:.50} in {panels} panels")
    return StoredChunk(
        _counts(content["offsets"]),
        _typed(content["file"], str),
        _count(content["start"]),
        blocks,
        _count(content["table"]),
        _checksum(content["checksum"]),
    )


def _tensor_from_json(content: Any) -> StoredTensor:
    dtype = dtype_of(_typed(content, dict)["dtype"])
    chunks = [chunk_from_json(chunk, dtype.itemsize) for chunk in _typed(content["chunks"], list)]
    return StoredTensor(_path(content["path"]), dtype, _counts(content["shape"]), tuple(chunks))


def _check_sizes(name: str, tensor: StoredTensor) -> None:
    """Raise ValueError unless all chunks are inside of a tensor, and have as many elements as it has."""
    if len(tensor.chunks) > _MAX_CHUNKS:
        raise ValueError(f"{name!r:.200} has {len(tensor.chunks)} chunks, and {_MAX_CHUNKS} are the most")
    for chunk in tensor.chunks:
        is_inside = len(chunk.offsets) == len(chunk.shape) == len(tensor.shape) and all(
            first + size <= full for first, size, full in zip(chunk.offsets, chunk.shape, tensor.shape, strict=True)
        )
        if not is_inside:
            raise ValueError(f"{name!r:.200} has a chunk outside of its shape {list(tensor.shape)!r:.100}")
    if sum(math.prod(chunk.shape) for chunk in tensor.chunks) != math.prod(tensor.shape):
        raise ValueError(f"the chunks of {name!r:.200} do not cover its shape {list(tensor.shape)!r:.100}")


def _check_overlap(name: str, tensor: StoredTensor) -> None:
    """Raise ValueError unless chunks whose sizes add up to that of a tensor cover it, so that none overlap.

    They do if and only if each corner of a chunk that is no corner of the tensor belongs to an even number of chunks,
    and each corner of the tensor to an odd one. For the number of chunks over each element is, modulo 2, determined by
    these corners. If it is that of the tensor, 1, each element is in at least one chunk, and the sizes leave no second.
    """
    chunks = [chunk for chunk in tensor.chunks if chunk.blocks.num_bytes > 0]
    if len(chunks) < 2:
        return
    split = [dim for dim, size in enumerate(tensor.shape) if any(chunk.shape[dim] != size for chunk in chunks)]
    if len(split) > _MAX_SPLIT_DIMS:
        raise ValueError(f"{name!r:.200} is split in {len(split)} dims, and {_MAX_SPLIT_DIMS} are the most")
    odd: set[tuple[int, ...]] = set(itertools.product(*((0, tensor.shape[dim]) for dim in split)))
    for chunk in chunks:
        sides = ((chunk.offsets[dim], chunk.offsets[dim] + chunk.shape[dim]) for dim in split)
        odd.symmetric_difference_update(itertools.product(*sides))
    if odd:
        raise ValueError(f"two chunks of {name!r:.200} overlap")
