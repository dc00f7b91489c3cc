"""weft verify and weft inspect: compare all checksums of a checkpoint, and print its content."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from weft.strategy.checkpoint.file_names import MANIFEST
from weft.strategy.checkpoint.locations import Location, location_of
from weft.strategy.checkpoint.manifest import Manifest
from weft.strategy.checkpoint.reading import ChunkReader


def _opened(path: str | os.PathLike[str]) -> tuple[Location, Manifest]:
    folder = location_of(path).existing()
    if not folder.exists(MANIFEST):
        raise FileNotFoundError(
            f"got {str(folder)!r}, which has no {MANIFEST}; pass a checkpoint directory, which weft 0.2 or later has "
            "written."
        )
    return folder, Manifest.read(folder)


def verify(path: str | os.PathLike[str]) -> list[str]:
    """Read all files of a checkpoint directory or URL; return a sentence for each damaged header and chunk.

    It needs no process group, and holds 4 MiB of tensors at a time (at a URL 16 MiB), or one block if that is larger.

    Raises:
        FileNotFoundError: it is no directory with a manifest.
        ValueError: the manifest is damaged, or does not agree with the files, such as a missing one.
    """
    folder, manifest = _opened(path)
    reader = ChunkReader(folder, manifest, lambda _: None)
    checks: list[Callable[[], None]] = [functools.partial(reader.check_header, file) for file in manifest.files]
    checks += [
        functools.partial(reader.check_chunk, name, chunk)
        for name, tensor in manifest.all_tensors()
        for chunk in tensor.chunks
    ]
    problems = []
    try:
        for check in checks:
            try:
                check()
            except (ValueError, OSError) as error:
                problems.append(str(error))
    finally:
        reader.close()
    return problems


@dataclass(frozen=True)
class TensorRow:
    """A tensor of a checkpoint: its dtype, shape and bytes, and in how many chunks it was written."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    num_chunks: int


@dataclass(frozen=True)
class Contents:
    """The content of a checkpoint directory; `str` is a table.

    Attributes:
        about: the versions of weft and torch, the mesh and the plan.
        tensors: of the sharded state.
        num_values: entries of the sharded state that are no tensors.
        files: (name, bytes).
        pickled: the objects that load with allow_pickle=True only.
    """

    path: str
    about: dict[str, Any]
    tensors: tuple[TensorRow, ...]
    num_values: int
    files: tuple[tuple[str, int], ...]
    pickled: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        """The bytes of all tensors of the sharded state."""
        return sum(row.num_bytes for row in self.tensors)

    def to_dict(self) -> dict[str, Any]:
        """Return the contents as JSON, with sizes in bytes."""
        return {**asdict(self), "num_bytes": self.num_bytes}

    def __str__(self) -> str:
        mesh = ", ".join(f"{name}={size}" for name, size in dict(self.about.get("mesh") or {}).items())
        lines = [
            f"{self.path}: {len(self.tensors)} tensors, {_bytes(self.num_bytes)}, in {len(self.files)} files",
            f"written by weft {self.about.get('weft')} with torch {self.about.get('torch')}, mesh: {mesh or 'none'}, "
            f"plan: {self.about.get('plan')}",
        ]
        if self.pickled:
            lines.append(f"loads with allow_pickle=True only: {', '.join(self.pickled)}")
        width = max((len(_printable(row.name)) for row in self.tensors), default=4)
        lines.append(f"{'tensor':<{width}}  {'dtype':<10}  {'shape':<16}  {'bytes':>10}  chunks")
        lines += [
            f"{_printable(row.name):<{width}}  {row.dtype:<10}  {'x'.join(map(str, row.shape)) or '-':<16}  "
            f"{_bytes(row.num_bytes):>10}  {row.num_chunks:>6}"
            for row in self.tensors
        ]
        return "\n".join(_printable(line) for line in lines)


def inspect(path: str | os.PathLike[str]) -> Contents:
    """Return the content of a checkpoint directory or URL, from its manifest; reads no tensors.

    Raises:
        FileNotFoundError: it is no directory with a manifest.
        ValueError: the manifest is damaged, or does not agree with the files.
    """
    folder, manifest = _opened(path)
    rows = tuple(
        TensorRow(name, str(tensor.dtype).removeprefix("torch."), tensor.shape, tensor.num_bytes, len(tensor.chunks))
        for name, tensor in sorted(manifest.tensors.items())
    )
    files = tuple(sorted((name, file.num_bytes) for name, file in manifest.files.items()))
    return Contents(str(folder), manifest.about, rows, len(manifest.values), files, manifest.object_paths)


def _printable(text: str) -> str:
    """Return a text whose characters a terminal only prints."""
    return "".join(each if each.isprintable() else f"\\x{ord(each):02x}" for each in text)


def _bytes(count: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"
