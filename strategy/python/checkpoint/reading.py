"""Reads regions of chunks, as the planner of torch.distributed.checkpoint asks for them, and compares checksums.

The planner splits the shards of a rank at the bounds of the chunks that were written.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, StorageReader
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
)
from torch.futures import Future

from weft.strategy.checkpoint.blocks import Span, bytes_of, checksum, checksums_in
from weft.strategy.checkpoint.locations import Location, path_in
from weft.strategy.checkpoint.manifest import Manifest, StoredChunk


class ValueLoadPlanner(DefaultLoadPlanner):
    """torch's planner for checkpoints with a manifest, whose values are not pickled."""

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], value)


def _metadata_of(manifest: Manifest) -> Metadata:
    entries: dict[str, Any] = {
        name: TensorStorageMetadata(
            TensorProperties(dtype=tensor.dtype),
            torch.Size(tensor.shape),
            [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.shape)) for chunk in tensor.chunks],
        )
        for name, tensor in manifest.tensors.items()
    }
    entries.update({name: BytesStorageMetadata() for name in manifest.values})
    paths = {name: tensor.path for name, tensor in manifest.tensors.items()}
    paths.update({name: value.path for name, value in manifest.values.items()})
    return Metadata(entries, planner_data=paths)


class ChunkReader(StorageReader):
    """Reads regions of chunks, and compares the checksums of the blocks that they are in.

    Args:
        manifest: of the checkpoint at `location`.
        value_of: returns the entry of a name that is no tensor.
        verify: compare checksums.
    """

    num_bytes_read: ClassVar[int] = 0  # by all objects of this process, headers excluded

    def __init__(
        self, location: Location, manifest: Manifest, value_of: Callable[[str], Any], verify: bool = True
    ) -> None:
        self.location = location
        self._manifest, self._value_of, self._verify = manifest, value_of, verify
        self._metadata = _metadata_of(manifest)
        self._chunks = {
            (name, chunk.offsets): (tensor, chunk)
            for name, tensor in manifest.tensors.items()
            for chunk in tensor.chunks
        }
        self._files = location.input_files()
        self._compared: set[str] = set()  # files whose headers have been compared
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._table: tuple[StoredChunk | None, Sequence[int]] = (None, ())

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a reader reads one checkpoint."""

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the manifest has been read."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the entries in the form of torch.distributed.checkpoint."""
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of a plan."""
        try:
            for item in plan.items:
                name = item.storage_index.fqn
                if item.type == LoadItemType.BYTE_IO:
                    planner.load_bytes(item, self._value_of(name))
                    continue
                target = planner.resolve_tensor(item).detach()
                assert item.storage_index.offset is not None
                tensor, chunk = self._chunks[name, tuple(item.storage_index.offset)]
                self.read(name, tensor.dtype, chunk, tuple(item.storage_offsets), target)
                planner.commit_tensor(item, target)
        finally:
            self.close()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def read(self, name: str, dtype: torch.dtype, chunk: StoredChunk, offsets: tuple[int, ...], target: Tensor) -> None:
        """Copy a region of a chunk to a tensor.

        Args:
            name: of the tensor, for errors.
            dtype: of the chunk; that of `target` may differ.
            offsets: the first index of the region in each dim of the chunk.
            target: has the region's shape.

        Raises:
            ValueError: the file is damaged.
        """
        if target.numel() == 0:
            return
        blocks = chunk.blocks
        sizes = tuple(target.shape)
        rows = (offsets[0], offsets[0] + sizes[0]) if sizes else (0, 1)
        columns = (offsets[1], offsets[1] + sizes[1]) if len(sizes) > 1 else (0, 1)
        trailing = tuple(slice(first, first + size) for first, size in zip(offsets[2:], sizes[2:], strict=True))
        for band in blocks.bands(rows, columns, self._files.max_bytes, self._files.min_bytes):
            data = self._read_band(name, chunk, band).view(dtype)
            if not sizes:
                target.copy_(data.view(()))
                continue
            first, last = band[0], band[-1]
            common = (max(rows[0], first.rows[0]), min(rows[1], first.rows[1]))
            from_rows = slice(common[0] - first.rows[0], common[1] - first.rows[0])
            to_rows = slice(common[0] - rows[0], common[1] - rows[0])
            if len(sizes) == 1:
                target[to_rows].copy_(data[from_rows])
                continue
            num_rows = first.rows[1] - first.rows[0]
            region = (slice(None), from_rows, slice(None), *trailing)
            panels = data.view(len(band), num_rows, blocks.panel_columns, *blocks.shape[2:])[region]
            if columns[0] <= first.columns[0] and last.columns[1] <= columns[1]:
                to_columns = slice(first.columns[0] - columns[0], last.columns[1] - columns[0])
                into = target[to_rows, to_columns].unflatten(1, (len(band), blocks.panel_columns))
                into.copy_(panels.transpose(0, 1))
                continue
            for span, values in zip(band, panels, strict=True):
                common = (max(columns[0], span.columns[0]), min(columns[1], span.columns[1]))
                from_columns = slice(common[0] - span.columns[0], common[1] - span.columns[0])
                to_columns = slice(common[0] - columns[0], common[1] - columns[0])
                target[to_rows, to_columns].copy_(values[:, from_columns])

    def _read_band(self, name: str, chunk: StoredChunk, band: Sequence[Span]) -> Tensor:
        """Return the bytes of spans of one size, one after another; the next call overwrites them."""
        num_bytes = band[0].num_bytes
        if self._buffer.numel() < len(band) * num_bytes:
            self._buffer = torch.empty(len(band) * num_bytes, dtype=torch.uint8)
        data = self._buffer[: len(band) * num_bytes]
        memory = bytes_of(data)
        checksums = self._checksums(name, chunk) if self._verify else ()
        for idx, span in enumerate(band):
            of_span = memory[idx * num_bytes : (idx + 1) * num_bytes]
            self._read_bytes(chunk.file, chunk.start + span.first_byte, of_span)
            if self._verify and (block := chunk.blocks.damaged(span, of_span, checksums)) is not None:
                raise ValueError(
                    f"the checkpoint's file {path_in(self.location, chunk.file)!r} is damaged: block {block} of "
                    f"{name!r}, which begins at byte {chunk.start}, does not have its checksum; load another "
                    "checkpoint."
                )
        ChunkReader.num_bytes_read += len(band) * num_bytes
        return data

    def _checksums(self, name: str, chunk: StoredChunk) -> Sequence[int]:
        """Return the checksums of a chunk's blocks; those of the last chunk are kept."""
        if chunk.table_bytes == 0:
            return [chunk.checksum]
        if self._table[0] is not chunk:
            table = bytearray(chunk.table_bytes)
            self._read_bytes(chunk.file, chunk.table, memoryview(table))
            if checksum(table) != chunk.checksum:
                raise ValueError(
                    f"the checkpoint's file {path_in(self.location, chunk.file)!r} is damaged: the checksums of "
                    f"{name!r}, which begin at byte {chunk.table}, do not have theirs; load another checkpoint."
                )
            self._table = (chunk, checksums_in(table))
        return self._table[1]

    def check_chunk(self, name: str, chunk: StoredChunk) -> None:
        """Raise ValueError if a chunk of the tensor `name` is damaged."""
        blocks = chunk.blocks
        if blocks.num_bytes > 0:
            for span in blocks.spans((0, blocks.num_rows), (0, blocks.num_columns), self._files.max_bytes):
                self._read_band(name, chunk, [span])

    def check_header(self, file: str) -> None:
        """Raise ValueError if the header of a file, or all of a file without tensors, is damaged; compared once."""
        if file not in self._compared:
            self._compared.add(file)
            header = bytearray(self._manifest.files[file].header_bytes)
            self._read_from(file, 0, memoryview(header))
            self._check_header(file, header)

    def read_file(self, file: str) -> bytes:
        """Return the bytes of a file without tensors."""
        stored = self._manifest.files[file]
        data = bytearray(stored.num_bytes)
        self._read_from(file, 0, memoryview(data))
        self._check_header(file, data)
        return bytes(data)

    def _check_header(self, file: str, header: bytearray) -> None:
        if self._verify and checksum(header) != self._manifest.files[file].header_checksum:
            raise ValueError(
                f"the checkpoint's file {path_in(self.location, file)!r} is damaged: its first {len(header)} bytes do "
                "not have their checksum; load another checkpoint."
            )

    def _read_bytes(self, file: str, start: int, memory: memoryview) -> None:
        """Read bytes of a file, after its header has been compared."""
        self.check_header(file)
        self._read_from(file, start, memory)

    def _read_from(self, file: str, start: int, memory: memoryview) -> None:
        while memory.nbytes > 0:
            count = self._files.read_into(file, start, memory)
            if count == 0:
                raise ValueError(
                    f"the checkpoint's file {path_in(self.location, file)!r} ends at byte {start}, and more bytes are "
                    "expected; load another checkpoint."
                )
            start += count
            memory = memory[count:]

    def close(self) -> None:
        """Close the files, and free the buffer."""
        self._files.close()
        self._compared = set()
        self._buffer = torch.empty(0, dtype=torch.uint8)
