"""Writes files and directories so that a crash leaves the old or the new one under a name, never a part of one.

A writer makes a directory beside the target, writes everything into it, and calls `publish`. That synchronises the
files and directories with the disk, and then gives the new directory the name in one system call: Linux exchanges two
names atomically (`renameat2` with RENAME_EXCHANGE), so that the name always has one of the two. The old one is removed
afterwards.

A file system that cannot exchange names, such as NFS, takes two renames. Between them nothing has the name, and the old
one is beside it as `.NAME.previous`: `restore_previous` gives it the name again.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_MAX_WRITE_BYTES = 1 << 30  # of one system call

# Called with the name of each system call that changes the file system, before it is made; for tests.
before_call: Callable[[str], None] | None = None


def publish(temporary: Path, path: Path) -> None:
    """Give a file or directory the name `path`, once it is on the disk, and remove what had that name before.

    Both must be in the same directory.
    """
    sync_tree(temporary)
    restore_previous(path)
    if not os.path.lexists(path):
        announce("rename")
        os.rename(temporary, path)
        sync_path(path.parent)
        return
    if not temporary.is_dir() and not path.is_dir():
        announce("replace")
        os.replace(temporary, path)
        sync_path(path.parent)
        return
    if not _exchange(temporary, path):
        previous = _previous(path)
        announce("rename")
        os.rename(path, previous)
        announce("rename")
        os.rename(temporary, path)
        announce("rename")
        os.rename(previous, temporary)  # so that what has the name of `previous` is always complete
    sync_path(path.parent)
    remove(temporary)


def restore_previous(path: Path) -> None:
    """Complete a `publish` that a crash has interrupted between its renames: remove the old one, or rename it back."""
    previous = _previous(path)
    if not os.path.lexists(previous):
        return
    if os.path.lexists(path):
        remove(previous)
    else:
        announce("rename")
        os.rename(previous, path)


def _previous(path: Path) -> Path:
    return path.with_name(f".{path.name}.previous")


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names atomically; return False if the system or the file system cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):  # glibc before 2.28, or not Linux
        return False
    announce("exchange")
    arguments = (_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)
    if libc.renameat2(*arguments) == 0:
        return True
    error = ctypes.get_errno()
    if error in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(error, os.strerror(error), str(one), None, str(other))


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
    file = os.open(path, os.O_RDONLY)
    with closing(file):
        sync(file)


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
