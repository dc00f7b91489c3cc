"""Checkpoints in local directories, whose saves are written beside them; see `weft.strategy.durable`."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from weft.strategy import durable

_MAX_OPEN_FILES = 64
_READ_BYTES = 4 << 20  # at a time: small enough to stay in a cache between checksum and copy


class LocalInputFiles:
    """The files of a directory; see `InputFiles`."""

    min_bytes = 64 << 10
    max_bytes = _READ_BYTES

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files: dict[str, int] = {}

    def read_into(self, name: str, start: int, memory: memoryview) -> int:
        return os.preadv(self._descriptor(name), [memory], start)

    def _descriptor(self, name: str) -> int:
        if name not in self._files:
            if len(self._files) >= _MAX_OPEN_FILES:
                os.close(self._files.pop(next(iter(self._files))))
            self._files[name] = os.open(self._path / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        return self._files[name]

    def close(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files = {}


class LocalLocation:
    """A directory, or what may become one; see `Location`."""

    is_local = True

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        return self.path.name

    def exists(self, name: str) -> bool:
        return (self.path / name).is_file()

    def is_directory(self) -> bool:
        return self.path.is_dir()

    def is_used(self) -> bool:
        return self.path.exists()

    def has_no_others(self) -> bool:
        return not self.path.is_dir()  # killed saves leave their files beside it

    def read(self, name: str, num_bytes: int | None = None) -> bytes:
        with open(self.path / name, "rb") as file:
            return file.read(-1 if num_bytes is None else num_bytes)

    def sizes(self, names: Iterable[str]) -> dict[str, int]:
        found = {}
        for name in names:
            try:
                status = os.lstat(self.path / name)
            except FileNotFoundError:
                continue
            if not stat.S_ISREG(status.st_mode):
                raise ValueError(f"{name!r} is no regular file")
            found[name] = status.st_size
        return found

    def input_files(self) -> LocalInputFiles:
        return LocalInputFiles(self.path)

    def existing(self) -> LocalLocation:
        return LocalLocation(durable.existing(self.path))

    def inner(self) -> list[LocalLocation]:
        paths = self.path.iterdir() if self.path.is_dir() else ()
        return [LocalLocation(path) for path in paths if not path.name.endswith(".partial")]

    def modified(self) -> float:
        return self.path.stat().st_mtime

    def new_name(self, name: str) -> str:
        return name

    def create(self, name: str, num_bytes: int) -> durable.NewFile:
        return durable.NewFile(self.path / name)

    def put(self, name: str, data: bytes) -> None:
        file = self.create(name, len(data))
        try:
            file.write(data)
        except BaseException:
            file.discard()
            raise
        file.close()

    def begin_save(self) -> str:
        durable.restore_previous(self.path)
        partial = durable.temporary_name(self.path)
        durable.remove(partial)
        durable.announce("mkdir")
        partial.mkdir(parents=True)
        return ""

    def for_save(self, token: str) -> LocalLocation:
        return LocalLocation(durable.temporary_name(self.path))

    def publish_as(self, target: Any) -> None:
        durable.publish(self.path, target.path)

    def remove(self) -> None:
        durable.remove(self.path)

    def copy_to(self, path: Path) -> None:
        shutil.copyfile(self.path, path)

    def write_file(self, write: Callable[[Any], None]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = durable.temporary_name(self.path)
        durable.remove(partial)
        durable.announce("open")
        write(partial)
        durable.publish(partial, self.path)
