"""Saves sharded state to a directory, and opens such directories; also those that weft 0.1 and Lightning have written.

A directory of weft 0.1, or of Lightning's ModelParallelStrategy, has shards of torch.distributed.checkpoint, whose list
`.metadata` is a pickle, and `meta.pt` with the other entries.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from weft.strategy import agreement
from weft.strategy.checkpoint import old_format
from weft.strategy.checkpoint.blocks import Blocks, checksum
from weft.strategy.checkpoint.file_names import MANIFEST, OBJECTS, REST_TENSORS
from weft.strategy.checkpoint.local import LocalLocation
from weft.strategy.checkpoint.locations import Location, Where, location_of
from weft.strategy.checkpoint.manifest import (
    Manifest,
    StoredFile,
    StoredTensor,
    StoredValue,
    has_manifest,
)
from weft.strategy.checkpoint.old_format import OldLoadPlanner, OldReader, read_rest
from weft.strategy.checkpoint.reading import ChunkReader, ValueLoadPlanner
from weft.strategy.checkpoint.values import decode, shifted
from weft.strategy.checkpoint.writing import ChunkWriter, Encoded, Placed, ValueSavePlanner, write_chunks


def is_checkpoint(where: Where) -> bool:
    """Return whether a directory or URL has the files of a checkpoint, which may be damaged."""
    location = location_of(where)
    return location.exists(MANIFEST) or (location.is_local and location.exists(old_format.REST))


def may_be_replaced(where: Where) -> bool:
    """Return whether a save may replace what is at a path or URL: all but a directory that is no checkpoint."""
    location = location_of(where)
    is_old = location.is_local and location.exists(old_format.REST)
    return location.has_no_others() or has_manifest(location) or is_old


def check_ranks(location: Location) -> None:
    """Raise ValueError if the ranks cannot share files at a location: memory:// is the memory of one process."""
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    if num_ranks > 1 and str(location).startswith("memory:"):
        raise ValueError(
            f"got the checkpoint {str(location)!r}, which is in the memory of one process, and {num_ranks} ranks; pass "
            "a path or URL that all ranks can read and write."
        )


def begin(location: Location) -> Location:
    """Begin a save to a location; return where the ranks write it, until `publish`; collective.

    Raises:
        ValueError: the ranks cannot share files there.
    """
    check_ranks(location)
    token = on_first_rank("save", location, location.begin_save)
    if not location.is_local and dist.is_initialized() and dist.get_world_size() > 1:
        tokens = [token]
        dist.broadcast_object_list(tokens)
        token = tokens[0]
    return location.for_save(token or "")


def publish(written: Location, location: Location) -> None:
    """Make a complete save, which was written where `begin` says, the checkpoint at `location`; collective."""
    on_first_rank("save", location, lambda: written.publish_as(location))


def save(
    directory: Where, state: Mapping[str, Any], rest: Mapping[str, Any], about: Mapping[str, Any]
) -> tuple[str, ...]:
    """Write a checkpoint; collective over the default group, if there is one.

    It is complete when its manifest is there, and stored durably when this function returns on the first rank.

    Args:
        directory: an existing, empty directory, or what `begin` has returned.
        state: nested dicts and lists with DTensors, tensors and other values. If several ranks have a value, one of
            them writes its own.
        rest: other entries, of the first rank.
        about: JSON for people, such as the layout.

    Returns:
        The paths of the values that are pickled because JSON cannot carry them; on other ranks than the first, ().

    Raises:
        Exception: this rank could not write.
        RuntimeError: another rank could not write.
    """
    location = location_of(directory)
    writer = plan_save(location, state)
    placed = [on_all_ranks("save", location, writer.write)]
    if dist.is_initialized() and dist.get_world_size() > 1:
        gathered: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(placed[0], gathered)
        placed = gathered or []
    pickled: tuple[str, ...] | None = on_first_rank(
        "save", location, lambda: write_manifest(writer, placed, Encoded.of(dict(rest), ""), about)
    )
    return pickled or ()


def plan_save(
    location: Location, state: Mapping[str, Any], copy: Callable[[Sequence[Tensor]], list[Tensor]] | None = None
) -> ChunkWriter:
    """Return a writer that has this rank's chunks of a state; collective. `copy`: see `ChunkWriter`."""
    writer = ChunkWriter(location, copy)
    _run("save", location, lambda: dcp.save(dict(state), storage_writer=writer, planner=ValueSavePlanner()))
    return writer


def on_first_rank(action: str, where: Where, call: Callable[[], Any]) -> Any:
    """Return what `call` returns on the first rank, and None on others, when it has returned; collective.

    Raises:
        Exception: on the first rank what `call` has raised, on others a RuntimeError with the text of that error.
    """
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    return on_all_ranks(action, where, call if is_first else lambda: None)


def on_all_ranks(action: str, where: Where, call: Callable[[], Any]) -> Any:
    """Return what `call` returns on this rank, when it has returned on all; see `agreement.on_all_ranks`."""
    return agreement.on_all_ranks(f"{action} the checkpoint {str(where)!r}", call)


def write_manifest(
    writer: ChunkWriter, placed: Sequence[Placed], rest: Encoded, about: Mapping[str, Any]
) -> tuple[str, ...]:
    """Write the files of the other entries, and the manifest of all; on the first rank.

    Args:
        writer: of this rank.
        placed: what each rank has written.
        rest: the other entries.

    Returns:
        The paths of the pickled values.
    """
    location = writer.location
    tensors: list[Tensor] = []
    objects: list[tuple[str, bytes]] = []

    def added(encoded: Encoded) -> Any:
        value = shifted(encoded.value, len(tensors), len(objects))
        tensors.extend(encoded.tensors)
        objects.extend(encoded.objects)
        return value

    values = {name: StoredValue(path, added(encoded)) for name, (path, encoded) in writer.values.items()}
    encoded_rest = added(rest)
    files = {name: file for each in placed for name, file in each.files.items()}
    rest_tensors: list[StoredTensor] = []
    if tensors:
        chunks = [
            (str(idx), Blocks.of(tuple(tensor.shape), tensor.dtype.itemsize), tensor.dtype)
            for idx, tensor in enumerate(tensors)
        ]
        name = location.new_name(REST_TENSORS)
        files[name], stored = write_chunks(location, name, chunks, tensors)
        for tensor, chunk in zip(tensors, stored, strict=True):
            rest_tensors.append(StoredTensor((), tensor.dtype, tuple(tensor.shape), (chunk,)))
    if objects:
        name = location.new_name(OBJECTS)
        files[name] = _write_objects(location, name, [data for _, data in objects])
    paths = tuple(path for path, _ in objects)
    stored_tensors = writer.tensors(placed)
    manifest = Manifest(dict(about), files, stored_tensors, values, encoded_rest, tuple(rest_tensors), paths).to_bytes()
    Manifest.from_bytes(manifest, location)  # raises before the old checkpoint is replaced if a file is not as planned
    location.put(MANIFEST, manifest)
    return paths


def _write_objects(location: Location, name: str, objects: list[bytes]) -> StoredFile:
    """Write the pickled objects as a list of bytes, so that each can be loaded without the others."""
    data = pickle.dumps(objects)
    location.put(name, data)
    return StoredFile(len(data), len(data), checksum(data))


class Checkpoint(Protocol):
    """An open directory.

    Attributes:
        location: where it is.
        metadata: the entries of the sharded state, and their paths as `planner_data`, as torch describes them.
    """

    location: Location
    metadata: Metadata

    def load(self, target: dict[str, Any], *, allow_partial: bool = False, alone: bool = False) -> None:
        """Fill the tensors in `target`, a nested state, and replace its other values; collective unless `alone`.

        Raises:
            RuntimeError: `target` has an entry that the checkpoint lacks, and `allow_partial` is not set.
            ValueError: a file is damaged.
        """

    def rest(self) -> dict[str, Any]:
        """Return the entries that are not in the sharded state."""


def open_checkpoint(
    where: Where, *, verify: bool = True, allow_pickle: bool = False, weights_only: bool | None = None
) -> Checkpoint:
    """Open a directory or URL.

    Args:
        verify: compare the checksums of all bytes that are read.
        allow_pickle: unpickle the objects that JSON cannot carry, and those of an old directory, which may run code.
        weights_only: as in `torch.load`, for the meta.pt of an old directory.

    Raises:
        FileNotFoundError: it is no checkpoint.
        ValueError: the manifest is damaged, or does not agree with the files.
    """
    location = location_of(where)
    if location.exists(MANIFEST):
        if location.is_local and location.exists(old_format.LIST):
            raise ValueError(
                f"the checkpoint {str(location)!r} has {MANIFEST} and {old_format.LIST}, of two saves; remove the "
                "older one, or load another checkpoint."
            )
        return _Checkpoint(location, verify, allow_pickle)
    if not isinstance(location, LocalLocation):
        raise FileNotFoundError(f"got {str(location)!r}, which has no {MANIFEST}; pass the URL of one checkpoint.")
    if not location.exists(old_format.LIST):
        raise FileNotFoundError(
            f"got {str(location)!r}, which has neither {MANIFEST} nor {old_format.LIST}; pass the directory of one "
            "checkpoint."
        )
    return _OldCheckpoint(location, allow_pickle, weights_only)


class _Checkpoint:
    """A directory with a manifest."""

    def __init__(self, location: Location, verify: bool, allow_pickle: bool) -> None:
        self.location = location
        self.manifest = Manifest.read(location)
        self._allow_pickle = allow_pickle
        self._objects: list[Any] | None = None
        self._reader = ChunkReader(location, self.manifest, self._value, verify)
        self.metadata = self._reader.read_metadata()

    def load(self, target: dict[str, Any], *, allow_partial: bool = False, alone: bool = False) -> None:
        planner = ValueLoadPlanner(allow_partial_load=allow_partial)
        _run(
            "load", self.location, lambda: dcp.load(target, storage_reader=self._reader, planner=planner, no_dist=alone)
        )

    def rest(self) -> dict[str, Any]:
        try:
            rest = self._decoded(self.manifest.rest)
        finally:
            self._reader.close()
        if not isinstance(rest, dict):
            raise ValueError(
                f"the checkpoint {str(self.location)!r} has no dict as its other entries; load another one."
            )
        return rest

    def _value(self, name: str) -> Any:
        return self._decoded(self.manifest.values[name].encoded)

    def _decoded(self, encoded: Any) -> Any:
        used: set[int] = set()  # a manifest that repeats a tensor would need more memory than the files have

        def tensor(idx: int) -> Tensor:
            if idx in used:
                raise ValueError(f"tensor {idx} occurs twice")
            used.add(idx)
            return self._rest_tensor(idx)

        try:
            return decode(encoded, tensor, self._object)
        except (RecursionError, ValueError) as error:
            if str(error).startswith("the checkpoint"):
                raise
            reason = "they are nested too deeply" if isinstance(error, RecursionError) else str(error)
            raise ValueError(
                f"the checkpoint {str(self.location)!r} has values that cannot be read ({reason}); load another one."
            ) from None

    def _rest_tensor(self, idx: int) -> Tensor:
        tensor = self.manifest.rest_tensors[idx]
        result = torch.empty(tensor.shape, dtype=tensor.dtype)
        for chunk in tensor.chunks:
            region = tuple(slice(first, first + size) for first, size in zip(chunk.offsets, chunk.shape, strict=True))
            self._reader.read(f"other tensor {idx}", tensor.dtype, chunk, (0,) * len(chunk.shape), result[region])
        return result

    def _object(self, idx: int) -> Any:
        if not self._allow_pickle:
            paths = ", ".join(self.manifest.object_paths[:10])
            raise ValueError(
                f"the checkpoint {str(self.location)!r} has Python objects that only pickle can read, which may run "
                f"code: {paths}; pass allow_pickle=True, an argument of the strategy and of consolidate_checkpoint, if "
                "you trust it, or save values that JSON can carry."
            )
        if self._objects is None:
            self._objects = pickle.loads(self._reader.read_file(self.manifest.objects_file or OBJECTS))
        return torch.load(io.BytesIO(self._objects[idx]), map_location="cpu", weights_only=False)


class _OldCheckpoint:
    """A directory of torch.distributed.checkpoint with meta.pt."""

    def __init__(self, location: LocalLocation, allow_pickle: bool, weights_only: bool | None) -> None:
        self.location: Location = location
        self._path = location.path
        self._allow_pickle = allow_pickle
        self._weights_only = False if allow_pickle and weights_only is None else weights_only
        self._reader = OldReader(location.path, allow_pickle)
        self.metadata = self._reader.read_metadata()

    def load(self, target: dict[str, Any], *, allow_partial: bool = False, alone: bool = False) -> None:
        planner = OldLoadPlanner(allow_partial, self._allow_pickle)
        _run(
            "load", self.location, lambda: dcp.load(target, storage_reader=self._reader, planner=planner, no_dist=alone)
        )

    def rest(self) -> dict[str, Any]:
        rest: dict[str, Any] = read_rest(self._path, self._weights_only)
        return rest


def _run(action: str, location: Location, call: Callable[[], Any]) -> None:
    """Call torch.distributed.checkpoint; raise the error of the first rank that has one, on all ranks.

    torch raises a CheckpointException, which is no Exception, with the stacks of all ranks.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*assuming the intent is to (load|save) in a single process")
            call()
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        if isinstance(cause, ValueError):
            raise cause from None
        raise RuntimeError(
            f"rank {rank} failed to {action} the checkpoint {str(location)!r} ({type(cause).__name__}: {cause}); "
            "remove the cause, and try again."
        ) from error
