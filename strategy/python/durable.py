"""Writes files and directories so that a crash leaves the old or the new one under a name, never a part of one.

A writer writes beside the target, and calls `publish`. That waits until the new file or directory is on the disk, and
then gives it the name in one system call: Linux exchanges two names atomically (`renameat2` with RENAME_EXCHANGE), so
that the name always has the old or the new one. The old one is removed afterwards.

A file system that cannot exchange names, such as NFS, takes two renames. Between them nothing has the name, and the old
one has another, hidden name: a reader finds it by `existing`, and the next writer gives it its name again.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_MAX_WRITE_BYTES = 1 << 30  # of one system call
# Errors of file systems, or of permissions, that do not let a directory be synchronised.
_UNSYNCED_DIRECTORY = (errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.EACCES, errno.EPERM)

# Called with the name of each system call that changes the file system, before it is made; for tests.
before_call: Callable[[str], None] | None = None


def temporary_name(path: Path) -> Path:
    """Return the name, in the same directory, under which a file or directory is written before it is published.

    A killed writer leaves it; the next writer of the same path removes it.
    """
    return _beside(path, "partial")


def _beside(path: Path, kind: str) -> Path:
    # Without the name itself: Lightning searches a directory for names that contain "hpc_ckpt_".
    absolute = path.absolute()
    digest = hashlib.sha256(os.fsencode(absolute.name)).hexdigest()
    return absolute.parent / f".weft-{digest[:16]}.{kind}"


def publish(temporary: Path, path: Path) -> None:
    """Give a file or directory, in the same directory as `path`, that name, and remove what had the name before.

    If the old one cannot be removed, a warning says so.
    """
    sync_tree(temporary)
    restore_previous(path)
    if not os.path.lexists(path):
        _rename(temporary, path)
        sync_path(path.parent)
        return
    if not temporary.is_dir() and not path.is_dir():
        announce("replace")
        os.replace(temporary, path)
        sync_path(path.parent)
        return
    if not _exchange(temporary, path):
        previous = _beside(path, "previous")
        _rename(path, previous)
        _rename(temporary, path)
        _rename(previous, temporary)  # so that what has the name of `previous` is always complete
    sync_path(path.parent)
    try:
        remove(temporary)
    except OSError as error:
        warnings.warn(
            f"weft: {str(path)!r} is complete, but the old one, now {str(temporary)!r}, cannot be removed ({error}); "
            "remove it.",
            stacklevel=2,
        )


def publish_new(temporary: Path, path: Path) -> None:
    """Give a directory the name `path`, which must be free; raises OSError if another directory with files has it."""
    sync_tree(temporary)
    _rename(temporary, path)
    sync_path(path.parent)


def existing(path: Path) -> Path:
    """Return `path` or, if a crash has left nothing under that name, the name of the old file or directory."""
    previous = _beside(path, "previous")
    return previous if not os.path.lexists(path) and os.path.lexists(previous) else path


def restore_previous(path: Path) -> None:
    """Complete a `publish` that a crash has interrupted between its renames; for writers only."""
    previous = _beside(path, "previous")
    if not os.path.lexists(previous):
        return
    if os.path.lexists(path):
        remove(previous)
    else:
        _rename(previous, path)


def _rename(old: Path, new: Path) -> None:
    announce("rename")
    os.rename(old, new)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names atomically; return False if the system or the file system does not."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):  # glibc before 2.28, or not Linux
        return False
    announce("exchange")
    # Systems report an unsupported exchange by many errors; a real one comes again from the renames.
    return bool(
        libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), ctypes.c_uint(_RENAME_EXCHANGE)) == 0
    )


def remove(path: Path) -> None:
    """Remove a file or a directory with its contents, if it exists."""
    if path.is_dir() and not path.is_symlink():
        announce("rmtree")
        shutil.rmtree(path)
    elif os.path.lexists(path):
        announce("unlink")
        path.unlink()


def announce(name: str) -> None:
    """Call `before_call` for a system call that changes the file system."""
    if before_call is not None:
        before_call(name)


class NewFile:
    """A file that must not exist, and is written from its first to its last byte."""

    def __init__(self, path: Path) -> None:
        self._file = create_file(path)

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        write(self._file, data)

    def close(self) -> None:
        """Close the file when its bytes are on the disk."""
        with closing(self._file):
            sync(self._file)

    def discard(self) -> None:
        """Close the file as it is."""
        os.close(self._file)


def create_file(path: Path) -> int:
    """Create a file that must not exist; return its descriptor."""
    announce("open")
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)


def write(file: int, data: bytes | memoryview) -> None:
    """Append all bytes to an open file."""
    rest = memoryview(data)
    while rest.nbytes > 0:
        announce("write")
        rest = rest[os.write(file, rest[:_MAX_WRITE_BYTES]) :]


def sync(file: int) -> None:
    """Wait until the contents of an open file or directory are on the disk."""
    announce("fsync")
    os.fsync(file)


def sync_path(path: Path) -> None:
    """Wait until a file's contents, or the names in a directory, are on the disk, if the file system can say so."""
    try:
        file = os.open(path, os.O_RDONLY)
        with closing(file):
            sync(file)
    except OSError as error:
        if not (path.is_dir() and error.errno in _UNSYNCED_DIRECTORY):
            raise


def sync_tree(path: Path) -> None:
    """Wait until a file, or a directory with all that is in it, is on the disk; not for its name in the parent."""
    for inner in sorted(path.rglob("*")) if path.is_dir() else ():
        sync_path(inner)
    sync_path(path)


@contextlib.contextmanager
def closing(file: int) -> Iterator[None]:
    """Close a descriptor at the end."""
    try:
        yield
    finally:
        os.close(file)
