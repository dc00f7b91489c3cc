"""Checkpoints at URLs of fsspec, such as s3://bucket/last.ckpt.

An object store has no folders, and cannot rename; it stores an object under its name when the object is complete. So
all saves of a checkpoint write below its URL, each under names of its own. Rank 0 writes the manifest last, as one
object, which replaces the one before: from then on it names the files of the new save. Then it removes the files of
the old one, and those that killed saves have left. Files of other names stay.

A reader reads ranges of bytes. It needs a store in which a read finds what was written before, as S3 has been since
2020.
"""

from __future__ import annotations

import contextlib
import functools
import posixpath
import secrets
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from weft.strategy import durable
from weft.strategy.checkpoint.file_names import MANIFEST, is_of_checkpoint, is_of_save, with_token

_READ_BYTES = 16 << 20  # by one request, whose latency is tens of milliseconds
_PART_BYTES = 32 << 20  # of a part of an upload, which is in memory until it is stored
_MAX_PARTS = 5000  # of a file; S3 takes 10,000
# Protocols of fsspec that write a file in steps, or cannot write.
_WITHOUT_OBJECTS = frozenset(
    {
        *("arrow_hdfs", "dask", "data", "dbfs", "dropbox", "ftp", "git", "github", "gitlab", "hdfs", "http", "https"),
        *("jlab", "jupyter", "libarchive", "reference", "sftp", "smb", "ssh", "tar", "webhdfs", "zip"),
    }
)


class RemoteInputFiles:
    """The files below a URL; see `InputFiles`."""

    min_bytes = max_bytes = _READ_BYTES

    def __init__(self, location: RemoteLocation) -> None:
        self._location = location

    def read_into(self, name: str, start: int, memory: memoryview) -> int:
        num_bytes = min(memory.nbytes, self.max_bytes)
        data = self._location.file_system.cat_file(self._location.path_of(name), start=start, end=start + num_bytes)
        memory[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Do nothing: no file is open."""


class RemoteFile:
    """A new object, whose bytes are uploaded in parts while they are written; see `OutputFile`."""

    def __init__(self, file_system: Any, path: str, num_bytes: int) -> None:
        durable.announce("create")
        self._file = file_system.open(path, "wb", block_size=max(_PART_BYTES, -(-num_bytes // _MAX_PARTS)))

    def write(self, data: bytes | memoryview) -> None:
        durable.announce("write")
        self._file.write(data)

    def flush(self) -> None:
        """Do nothing, for `torch.save`: a part is uploaded when it is full."""

    def close(self) -> None:
        try:
            durable.announce("complete")
            self._file.close()
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Abort the upload, so that the object does not exist; in fsspec's memory, its beginning stays.

        The caller has an error to raise: one of the abort is not raised.
        """
        from fsspec.spec import AbstractBufferedFile

        with contextlib.suppress(Exception):
            self._file.discard()
        if isinstance(self._file, AbstractBufferedFile):
            self._file.closed = True  # else fsspec completes the object when this is collected


class RemoteLocation:
    """A URL below which the files of a checkpoint are; see `Location`.

    Args:
        url: of any protocol that fsspec knows.
        token: of the save that writes here.
    """

    is_local = False

    def __init__(self, url: str, token: str = "") -> None:
        protocol, separator, path = url.partition("://")
        self.url = protocol + separator + path.rstrip("/")
        self._token = token

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        return posixpath.basename(self.url)

    @property
    def protocol(self) -> str:
        return self.url.partition("://")[0].lower()

    @functools.cached_property
    def _opened(self) -> tuple[Any, str]:
        """Return fsspec's file system, which keeps no lists of files, and the path of the URL in it."""
        from fsspec.core import url_to_fs

        if self.protocol in _WITHOUT_OBJECTS:
            raise ValueError(
                f"got the checkpoint {self.url!r}, and {self.protocol} does not replace a file at once; pass the URL "
                "of an object store, such as s3://bucket/name, or a path."
            )
        try:
            file_system, path = url_to_fs(self.url, use_listings_cache=False)
        except ImportError as error:
            raise ImportError(f"got the checkpoint {self.url!r}, which needs a package of fsspec: {error}.") from error
        except ValueError as error:
            raise ValueError(
                f"got the checkpoint {self.url!r}, which fsspec cannot use ({error}); pass the URL of a protocol that "
                "fsspec knows, such as s3://bucket/name, or a path."
            ) from error
        return file_system, path.rstrip("/")

    @property
    def file_system(self) -> Any:
        """Return fsspec's file system."""
        return self._opened[0]

    def path_of(self, name: str) -> str:
        """Return the path of a file in the file system."""
        return f"{self._opened[1]}/{name}"

    def entries(self) -> dict[str, dict[str, Any]]:
        """Return what fsspec says about the files and folders directly below the URL, by name."""
        try:
            found = self.file_system.ls(self._opened[1], detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        prefix = self.path_of("")
        paths = ((each["name"].rstrip("/"), each) for each in found)
        return {path.removeprefix(prefix): each for path, each in paths if path.startswith(prefix)}

    def exists(self, name: str) -> bool:
        return self._is_object(self.path_of(name))

    def is_directory(self) -> bool:
        return self.exists(MANIFEST) or not self._is_file()

    def is_used(self) -> bool:
        return self.exists(MANIFEST) or self._is_file()

    def _is_file(self) -> bool:
        return self._is_object(self._opened[1])

    def _is_object(self, path: str) -> bool:
        """Return whether there is an object; unlike fsspec's `isfile`, raise other errors of the store."""
        try:
            return bool(self.file_system.info(path)["type"] == "file")
        except (FileNotFoundError, NotADirectoryError):
            return False

    def has_no_others(self) -> bool:
        return all(each["type"] == "file" and is_of_save(name) for name, each in self.entries().items())

    def read(self, name: str, num_bytes: int | None = None) -> bytes:
        path = self.path_of(name)
        try:
            return bytes(self.file_system.cat_file(path, start=None if num_bytes is None else 0, end=num_bytes))
        except OSError:
            if self._is_object(path) and self.file_system.size(path) == 0:  # of which S3 has no range
                return b""
            raise

    def sizes(self, names: Iterable[str]) -> dict[str, int]:
        found = self.entries()
        for name in names:
            if name in found and found[name]["type"] != "file":
                raise ValueError(f"{name!r} is no regular file")
        return {name: found[name]["size"] for name in names if name in found}

    def input_files(self) -> RemoteInputFiles:
        return RemoteInputFiles(self)

    def existing(self) -> RemoteLocation:
        return self

    def inner(self) -> list[RemoteLocation]:
        entries = self.entries().items()
        return [RemoteLocation(f"{self.url}/{name}") for name, each in entries if each["type"] == "directory"]

    def modified(self) -> float:
        return float(self.file_system.modified(self.path_of(MANIFEST)).timestamp())

    def new_name(self, name: str) -> str:
        if not self._token:
            raise RuntimeError(f"a save to {self.url!r} has no token; call `begin` first.")
        return with_token(self._token, name)

    def create(self, name: str, num_bytes: int) -> RemoteFile:
        return RemoteFile(self.file_system, self.path_of(name), num_bytes)

    def put(self, name: str, data: bytes) -> None:
        durable.announce("put")
        self.file_system.pipe_file(self.path_of(name), data)

    def begin_save(self) -> str:
        return secrets.token_hex(8)

    def for_save(self, token: str) -> RemoteLocation:
        return RemoteLocation(self.url, token)

    def publish_as(self, target: Any) -> None:
        """Remove the files of other saves: the manifest names those of this one."""
        try:
            self._remove_files(lambda name: not name.startswith(with_token(self._token, "")))
            if self._is_file():
                durable.announce("remove")
                self.file_system.rm_file(self._opened[1])
        except Exception as error:
            warnings.warn(
                f"weft: {self.url!r} is complete, but files of an old save below it cannot be removed ({error}); the "
                "next save tries it again.",
                stacklevel=2,
            )

    def remove(self) -> None:
        """Remove the manifest, and then the other files of the checkpoint; files of other names stay."""
        if self.exists(MANIFEST):
            durable.announce("remove")
            self.file_system.rm_file(self.path_of(MANIFEST))
        self._remove_files(lambda _: True)

    def _remove_files(self, is_old: Callable[[str], bool]) -> None:
        for name in [name for name in self.entries() if is_of_checkpoint(name) and is_old(name)]:
            durable.announce("remove")
            self.file_system.rm_file(self.path_of(name))  # `rm` would take a "[" in the URL for a pattern

    def copy_to(self, path: Path) -> None:
        if not self._is_file():
            if self.exists(MANIFEST):
                raise IsADirectoryError(f"got {self.url!r}, which is a directory of shards; pass a state to load.")
            raise FileNotFoundError(
                f"got {self.url!r}, which has no {MANIFEST} and is no file; pass the URL of one checkpoint."
            )
        self.file_system.get_file(self._opened[1], str(path))

    def write_file(self, write: Callable[[Any], None]) -> None:
        file = RemoteFile(self.file_system, self._opened[1], 0)
        try:
            write(file)
        except BaseException:
            file.discard()
            raise
        file.close()
        if self.exists(MANIFEST):  # until now, it was the checkpoint
            self.remove()
