"""Prints the traceback of an error once, even if several ranks raise the error.

The ranks of a host share a log, an unnamed file that one rank creates and the others open through /proc. The log lists
the errors that have been printed, and the stderr to which each was printed. A rank that fails locks the log (its
*turn*) and searches the log for its error. If another rank has printed the error, the rank prints one line that names
that rank. Otherwise it prints the traceback and adds an entry to the log. The kernel releases the lock of a rank that
dies in its turn; the next rank finds no entry and prints. A rank that gets no turn within TURN_SECONDS, that has no
log, or whose stderr is another file prints its traceback.

Errors are the same if their types, texts (apart from addresses), causes and frames are. The frames of Lightning and of
weft's launcher do not count, because only rank 0 goes through the launcher.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from types import TracebackType

import torch.distributed as dist

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

# Shorter than the grace periods of process_guard.py, after which a rank that still waits for its turn is killed.
TURN_SECONDS = 1.0
_POLL_SECONDS = 0.005
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]+\b")
_LIGHTNING = ("lightning", "lightning_fabric", "pytorch_lightning")


class ErrorReports:
    """One rank's access to the log of printed errors; made by `create` or `open`."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def create(cls) -> ErrorReports | None:
        """Create a log for the ranks of this host; return None if the system cannot share one."""
        if fcntl is None or not hasattr(os, "memfd_create"):
            return None
        with contextlib.suppress(OSError):
            return cls(os.memfd_create("weft-error-reports"))
        return None

    @classmethod
    def open(cls, path: str) -> ErrorReports | None:
        """Open another process's log by its `path`; return None on failure, such as when that process has ended."""
        with contextlib.suppress(OSError):
            return cls(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        return None

    @property
    def path(self) -> str:
        """The path at which other processes of this host can open the log while this process runs."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def report(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None, show: Callable[[], object]
    ) -> None:
        """Call `show`, which prints the traceback; if another rank has printed the same error, print one line instead.

        If anything but `show` fails, the traceback is still printed.
        """
        with contextlib.ExitStack() as turn:
            has_turn = False
            with contextlib.suppress(Exception):  # without a turn the traceback is printed
                key = f"{_stderr_identity()} {_signature(kind, error, trace)}"
                turn.enter_context(self._turn())
                has_turn = True
                other = self._printed().get(key)
                if other is not None:
                    _write_stderr(
                        f"weft: rank {_rank()} raised the same {kind.__name__} as rank {other}: see its traceback.\n"
                    )
                    return
            show()
            if has_turn:
                with contextlib.suppress(Exception):
                    sys.stderr.flush()  # raises if the traceback could not be written
                    os.lseek(self._fd, 0, os.SEEK_END)
                    os.write(self._fd, f"{key} {_rank()}\n".encode())

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Hold the lock of the log inside; raises TimeoutError if it is not free within TURN_SECONDS."""
        deadline = time.monotonic() + TURN_SECONDS
        while True:
            try:
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # forked processes do not inherit the lock
                break
            except (BlockingIOError, PermissionError):  # POSIX allows either
                if time.monotonic() >= deadline:
                    raise TimeoutError from None
                time.sleep(_POLL_SECONDS)
        try:
            yield
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN)

    def _printed(self) -> dict[str, str]:
        """Return {key of an error, see `report`: the rank that printed the error}."""
        lines = os.pread(self._fd, os.fstat(self._fd).st_size, 0).decode().splitlines()
        return {key: rank for key, _, rank in (line.rpartition(" ") for line in lines)}


@functools.cache  # a process has one stderr and one agent
def shared_under_torchrun(local_rank: int, node_rank: int) -> ErrorReports | None:
    """Return the log that the workers of one torchrun agent share; None if no log can be shared. Collective.

    The worker with local_rank 0 creates the log and passes its path to the others through the job's store.
    """
    with contextlib.suppress(Exception):  # sharing a log is optional: a failure must not end the run
        from weft.strategy.agreement import name_start

        assert dist.group.WORLD is not None
        store = dist.group.WORLD.get_group_store()
        key = f"weft/error_reports/{name_start()}/{node_rank}"
        if local_rank != 0:
            return ErrorReports.open(store.get(key).decode())
        reports = ErrorReports.create()
        store.set(key, "" if reports is None else reports.path)
        return reports
    return None


def _write_stderr(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("LOCAL_RANK", "0"))


def _stderr_identity() -> str:
    """Return device and inode of stderr: a rank whose stderr is another file must print its traceback there."""
    status = os.fstat(sys.stderr.fileno())
    return f"{status.st_dev}:{status.st_ino}"


def _signature(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> str:
    """Return a hash that is equal for errors of two ranks whose tracebacks have the same content."""
    files = [file for file in map(_file_of, _LIGHTNING) if file is not None]
    left_out = (*(os.path.join(os.path.dirname(file), "") for file in files), _file_of("weft._plugin.launcher") or "?")
    parts: list[str] = []
    to_do = [traceback.TracebackException(kind, error, trace, lookup_lines=False)]
    while to_do:
        each = to_do.pop()
        frames = (frame for frame in each.stack if not frame.filename.startswith(left_out))
        parts += [f"{frame.filename}:{frame.lineno}" for frame in frames]
        parts += each.format_exception_only()
        to_do += [other for other in (each.__cause__, each.__context__) if other is not None]
        to_do += getattr(each, "exceptions", None) or []  # of an ExceptionGroup
    text = _ADDRESS.sub("0x", "\n".join(parts))
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()


def _file_of(module: str) -> str | None:
    return getattr(sys.modules.get(module), "__file__", None)
