"""Writes this rank's chunks for torch.distributed.checkpoint, whose planner deals them among the ranks.

Values that are no tensors are encoded as JSON, not pickled.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import math
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, StorageWriter
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from weft.strategy.checkpoint.blocks import Blocks, bytes_of, checksum, table_of
from weft.strategy.checkpoint.file_names import rank_file
from weft.strategy.checkpoint.locations import Location
from weft.strategy.checkpoint.manifest import StoredChunk, StoredFile, StoredTensor
from weft.strategy.checkpoint.values import NAMES_OF_DTYPES, Encoder
from weft.strategy.tensor_files import DTYPES, OutputTensor, TensorFile

_TABLE = "block checksums"  # the name of the last tensor of a file


class ValueSavePlanner(DefaultSavePlanner):
    """torch's planner, but values that are no tensors are not pickled, and ranks write about the same bytes.

    torch deals chunks that several ranks have in their order, and counts a chunk as the full tensor.
    """

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return super().create_global_plan(_dealt(all_plans))

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        return object


def _dealt(plans: list[SavePlan]) -> list[SavePlan]:
    """Return plans in which one rank writes each chunk: the largest first, by the rank with the fewest bytes so far."""
    holders: dict[MetadataIndex, list[int]] = {}
    items: dict[MetadataIndex, WriteItem] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            holders.setdefault(item.index, []).append(rank)
            items.setdefault(item.index, item)
    num_bytes = [0] * len(plans)
    writer: dict[MetadataIndex, int] = {}
    # Chunks of one rank count first, so that the others fill what they leave.
    for index in sorted(items, key=lambda index: (len(holders[index]) > 1, -_bytes_of(items[index]))):
        writer[index] = min(holders[index], key=num_bytes.__getitem__)
        num_bytes[writer[index]] += _bytes_of(items[index])
    return [
        dataclasses.replace(plan, items=[item for item in plan.items if writer[item.index] == rank])
        for rank, plan in enumerate(plans)
    ]


def _bytes_of(item: WriteItem) -> int:
    data = item.tensor_data
    return 1 if data is None else math.prod(data.chunk.sizes) * data.properties.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Encoded:
    """A value that a rank sends to the first one: its JSON, and the tensors and pickled objects that JSON cannot carry.

    objects: (path, bytes of torch.save) of each object.
    """

    value: Any
    tensors: tuple[Tensor, ...]
    objects: tuple[tuple[str, bytes], ...]

    @classmethod
    def of(cls, value: Any, path: str) -> Encoded:
        """Return a value, which `path` names, for sending; raises what pickling an object raises."""
        encoder = Encoder()
        encoded = encoder.encode(value, path)
        objects = []
        for path_of_object, each in encoder.objects:
            buffer = io.BytesIO()
            torch.save(each, buffer)
            objects.append((path_of_object, buffer.getvalue()))
        return cls(encoded, tuple(tensor.detach().to("cpu", copy=True) for tensor in encoder.tensors), tuple(objects))


@dataclasses.dataclass(frozen=True)
class Placed:
    """The file of a rank by name, if it has chunks, and its chunks by the names of their tensors."""

    files: dict[str, StoredFile]
    chunks: tuple[tuple[str, StoredChunk], ...]


@dataclasses.dataclass(frozen=True)
class _Planned:
    """A chunk that this rank writes: the name of its tensor, and its own in the file."""

    tensor: str
    name: str
    offsets: tuple[int, ...]
    blocks: Blocks
    dtype: torch.dtype


class ChunkWriter(StorageWriter):
    """Keeps the chunks that torch's planner gives to this rank, until `write` writes them to one file.

    Args:
        location: where the save is written.
        copy: returns copies of the values of all chunks; None: the values themselves are kept until they are written.

    Attributes:
        values: (path, encoded value) of the entries that are no tensors, by name; on the coordinator.
    """

    def __init__(self, location: Location, copy: Callable[[Sequence[Tensor]], list[Tensor]] | None = None) -> None:
        self.location = location
        self.values: dict[str, tuple[tuple[str | int, ...], Encoded]] = {}
        self._copy = copy
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._planned: list[_Planned] = []
        self._values: list[Tensor] = []
        self._tensors: dict[str, tuple[tuple[str | int, ...], torch.dtype, tuple[int, ...]]] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a writer writes one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the save has begun."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Keep the chunks of a plan; the results give the other values to the coordinator."""
        results = []
        tensors = []
        for item in plan.items:
            name = item.index.fqn
            if item.type == WriteItemType.BYTE_IO:
                results.append(WriteResult(item.index, 0, Encoded.of(planner.resolve_data(item), name)))
                continue
            data, values = item.tensor_data, planner.resolve_data(item)
            assert data is not None and isinstance(values, Tensor)
            if data.properties.dtype not in NAMES_OF_DTYPES:
                raise _unknown_dtype(name, data.properties.dtype)
            if is_traceable_wrapper_subclass(values):
                raise _unknown_class(name, type(values))
            shape, offsets = tuple(data.chunk.sizes), tuple(data.chunk.offsets)
            own_name = name if shape == tuple(data.size) else f"{name}@{','.join(map(str, offsets))}"
            dtype = data.properties.dtype
            self._planned.append(_Planned(name, own_name, offsets, Blocks.of(shape, dtype.itemsize), dtype))
            tensors.append(values.detach())
        self._values = tensors if self._copy is None else self._copy(tensors)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Keep the entries of all ranks; called on the coordinator."""
        paths = metadata.planner_data
        for result in (each for of_rank in results for each in of_rank):
            self.values[result.index.fqn] = (tuple(paths[result.index.fqn]), result.storage_data)
        for name, entry in metadata.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata):
                self._tensors[name] = (tuple(paths[name]), entry.properties.dtype, tuple(entry.size))

    def write(self) -> Placed:
        """Write this rank's file, if it has chunks, wait until it is stored, and let go of the values."""
        planned, self._planned = self._planned, []
        values, self._values = self._values, []
        if not planned:
            return Placed({}, ())
        name = self.location.new_name(rank_file(self._rank))
        wanted = [(each.name, each.blocks, each.dtype) for each in planned]
        file, chunks = write_chunks(self.location, name, wanted, values)
        placed = (dataclasses.replace(c, offsets=each.offsets) for c, each in zip(chunks, planned, strict=True))
        return Placed({name: file}, tuple((each.tensor, c) for each, c in zip(planned, placed, strict=True)))

    def tensors(self, placed: Iterable[Placed]) -> dict[str, StoredTensor]:
        """Return all tensors with the chunks that the ranks have written; on the coordinator."""
        chunks: dict[str, list[StoredChunk]] = {name: [] for name in self._tensors}
        for name, chunk in (each for of_rank in placed for each in of_rank.chunks):
            chunks[name].append(chunk)
        return {name: StoredTensor(*about, tuple(chunks[name])) for name, about in self._tensors.items()}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def storage_meta(self) -> StorageMeta | None:
        return None


def _unknown_dtype(name: str, dtype: torch.dtype) -> ValueError:
    return ValueError(f"the checkpoint cannot store {name!r} of {dtype}; save it as another dtype.")


def _unknown_class(name: str, cls: type) -> TypeError:
    return TypeError(
        f"the checkpoint cannot store {name!r}, a tensor of class {cls.__name__} without elements of its own; use an "
        "optimizer with plain tensors as states, such as AdamW with optimizer_state='int8', or save only weights."
    )


def write_chunks(
    location: Location, file_name: str, chunks: list[tuple[str, Blocks, torch.dtype]], values: Iterable[Tensor]
) -> tuple[StoredFile, list[StoredChunk]]:
    """Write a safetensors file with chunks, and after them their blocks' checksums; wait until it is stored.

    Args:
        location, file_name: where no file of this name exists.
        chunks: (name, blocks, dtype) of each chunk.
        values: yields the elements of each chunk, as a tensor of the chunk's shape.

    Returns:
        The file, and the chunks, with zeros as their offsets.
    """
    taken = {"__metadata__", _TABLE}
    outputs = []
    for wanted, blocks, dtype in chunks:
        name = wanted
        while name in taken:
            name += "_"
        taken.add(name)
        if dtype not in NAMES_OF_DTYPES:
            raise _unknown_dtype(wanted, dtype)
        if dtype in DTYPES:
            outputs.append(OutputTensor(name, blocks.stored_shape, dtype))
        else:
            outputs.append(OutputTensor(name, (blocks.num_bytes,), torch.uint8))
    num_checksums = sum(blocks.num_blocks for _, blocks, _ in chunks if blocks.num_blocks > 1)
    outputs.append(OutputTensor(_TABLE, (num_checksums,), torch.int64))
    file = TensorFile(functools.partial(location.create, file_name), outputs)
    stored: list[StoredChunk] = []
    tables: list[Tensor] = []
    try:
        start = len(file.header)
        table = start + sum(blocks.num_bytes for _, blocks, _ in chunks)
        for (_, blocks, _), value in zip(chunks, values, strict=True):
            if value.nbytes != blocks.num_bytes:
                raise ValueError(f"a tensor to be written has {value.nbytes} bytes, and {blocks.num_bytes} are planned")
            checksums = []
            for data, of_part in blocks.parts(value):
                file.write_bytes(data)
                checksums += of_part
            own, first_of_table = sum(checksums), 0
            if len(checksums) > 1:
                tables.append(table_of(checksums))
                own, first_of_table = checksum(bytes_of(tables[-1])), table
                table += tables[-1].nbytes
            stored.append(StoredChunk((0,) * len(blocks.shape), file_name, start, blocks, first_of_table, own))
            start += blocks.num_bytes
        for each in tables:
            file.write_bytes(bytes_of(each))
    except BaseException:
        file.discard()
        raise
    file.close()
    return StoredFile(file.num_bytes, len(file.header), checksum(file.header)), stored
