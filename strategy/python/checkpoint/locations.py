"""Where a checkpoint is: a local directory, or a URL of fsspec, such as s3://bucket/last.ckpt.

`LocalLocation` and `RemoteLocation` say how the files of one checkpoint are read and written there, and how a save
becomes the checkpoint.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from weft.strategy.checkpoint.local import LocalLocation
from weft.strategy.tensor_files import OutputFile

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_COLLAPSED = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/(?!/)")


class InputFiles(Protocol):
    """The files of a checkpoint, open for reading.

    Attributes:
        min_bytes, max_bytes: the fewest and the most bytes that a call of `read_into` reads fast.
    """

    min_bytes: int
    max_bytes: int

    def read_into(self, name: str, start: int, memory: memoryview) -> int:
        """Read some bytes from the byte `start` of a file on; return their number, 0 at its end."""

    def close(self) -> None:
        """Close the files; a later read opens them again."""


class Location(Protocol):
    """Where the files of one checkpoint are; `str` is the path or URL.

    Attributes:
        is_local: it is a path.
        name: the last part of the path or URL.
    """

    is_local: bool

    @property
    def name(self) -> str: ...

    def exists(self, name: str) -> bool:
        """Return whether there is a file `name`."""

    def is_directory(self) -> bool:
        """Return whether there are files of a directory, not one file that has the path or URL itself."""

    def is_used(self) -> bool:
        """Return whether there is a checkpoint or a file, which may be damaged."""

    def has_no_others(self) -> bool:
        """Return whether there are no files but those that killed saves have left."""

    def read(self, name: str, num_bytes: int | None = None) -> bytes:
        """Return the first bytes of a file, or all.

        Raises:
            FileNotFoundError, NotADirectoryError, IsADirectoryError: there is no such file.
        """

    def sizes(self, names: Iterable[str]) -> dict[str, int]:
        """Return the bytes of the files that exist; raises ValueError for one that is no regular file."""

    def input_files(self) -> InputFiles:
        """Return the files for reading."""

    def existing(self) -> Location:
        """Return the location or, if a crash during a save has left nothing there, that of the old checkpoint."""

    def inner(self) -> Sequence[Location]:
        """Return the locations of the directories directly inside."""

    def modified(self) -> float:
        """Return when the checkpoint was complete, in seconds since 1970."""

    def new_name(self, name: str) -> str:
        """Return the name under which a save writes the file `name`."""

    def create(self, name: str, num_bytes: int) -> OutputFile:
        """Create a file that does not exist, for `num_bytes`."""

    def put(self, name: str, data: bytes) -> None:
        """Write a file at once; it is stored durably when this returns."""

    def begin_save(self) -> str:
        """Remove what a killed save has left, if it hinders; return the token of a new save; on the first rank."""

    def for_save(self, token: str) -> Location:
        """Return where the ranks write the save `token`, until `publish_as` makes it the checkpoint."""

    def publish_as(self, target: Location) -> None:
        """Make the save that was written here the checkpoint `target`, and remove the old one; on the first rank."""

    def remove(self) -> None:
        """Remove the checkpoint."""

    def copy_to(self, path: Path) -> None:
        """Copy the file that has the path or URL itself; raises FileNotFoundError if there is none."""

    def write_file(self, write: Callable[[Any], None]) -> None:
        """Call `write` with a path or an open file, and make that the file with this path or URL."""


Where = Location | str | os.PathLike[str]


def location_of(where: Where) -> Location:
    """Return the location of a path or URL; URLs of the protocol file are paths.

    Raises:
        ValueError: it is a chain of URLs, or a URL that a Path has changed.
    """
    if not isinstance(where, (str, os.PathLike)):
        return where
    text = os.fspath(where)
    if "::" in text and "://" in text:
        raise ValueError(f"got the chain of URLs {text!r}; pass the URL of one file system.")
    found = _URL.match(text)
    if found is None:
        if isinstance(where, os.PathLike) and _COLLAPSED.match(text):
            raise ValueError(f"got {where!r}, in which a URL has lost a slash; pass URLs as str, not as Path.")
        return LocalLocation(Path(text))
    if found[1].lower() in ("file", "local"):
        return LocalLocation(Path(text[found.end() :]))
    from weft.strategy.checkpoint.remote import RemoteLocation

    return RemoteLocation(text)


def joined(where: Where, name: str) -> Location:
    """Return the location of `name` in the directory or below the URL `where`."""
    location = location_of(where)
    return location_of(Path(str(location)) / name if location.is_local else f"{location}/{name}")


def path_in(location: Location, name: str) -> str:
    """Return the path or URL of a file, for errors."""
    return os.path.join(str(location), name)
