"""Ends all ranks of a process tree soon after one of them fails or is stopped.

Terms: the process that the user starts on a host becomes rank 0 of the host. Its Lightning launcher starts the host's
other ranks as its *children*, which run the same script. Under torchrun every rank is a child of torchrun, which
watches them itself.

A rank blocked in a collective runs no Python in its main thread, so neither signal handlers nor
exceptions reach it. The guard uses means that still work then: a daemon thread (collectives release the GIL), the
wake-up pipe that CPython's C-level signal handler writes to, and the kernel's parent-death signal.

    rank 0 is killed           -> the children end: on Linux by PR_SET_PDEATHSIG, elsewhere by their own guards
    a child fails              -> the guard of rank 0 ends the tree after CHILD_GRACE_SECONDS
    SIGINT or SIGTERM in a run -> Python's handlers run; after SIGNAL_GRACE_SECONDS the guard ends the tree, or after
                                  the time of `limit_signals`
    an exception on rank 0     -> its traceback; at its exit, it kills children that outlive CHILDREN_EXIT_SECONDS
    an exception on a child    -> the child exits without waiting for other ranks: see "a child fails"

Ranks that raise the same error print one traceback: see `error_reports.py`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any

from weft._plugin.error_reports import ErrorReports

LAUNCHER_PID_VARIABLE = "WEFT_LAUNCHER_PID"
ERROR_REPORTS_VARIABLE = "WEFT_ERROR_REPORTS"
SIGNAL_GRACE_SECONDS = 4.0  # from a signal to the end of the tree
CHILD_GRACE_SECONDS = 2.5  # from the end of a failed child to the end of the tree
CHILDREN_EXIT_SECONDS = 2.0  # at the exit of a failed rank 0: how long its children may still run
FAILED_EXIT_SECONDS = 4  # how long a failed process may take to exit after its children have ended
_POLL_SECONDS = 0.2
_PR_SET_PDEATHSIG = 1
_STOP_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM})


class ProcessGuard:
    """The guard of this process: one thread, one wake-up pipe, one exit handler. See `guard()`."""

    def __init__(self) -> None:
        self._owner_pid = os.getpid()
        self._children: Sequence[subprocess.Popen[Any]] = ()
        self._parent_pid: int | None = None
        self._watches_signals = False
        self._limited: dict[int, float | None] = {}  # seconds from a signal to the end of the tree
        self._failed = False
        self._ending = False
        self._deadline: float | None = None
        self._status = 1
        self._on_clean_exit: list[Callable[[], None]] = []
        self._before_executors_end: list[Callable[[], None]] = []
        self._previous_wakeup_fd = -1
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        os.set_blocking(self._write_fd, False)
        if threading.current_thread() is threading.main_thread():
            self._previous_wakeup_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        self._reports: ErrorReports | None = None
        self._excepthooks: list[Callable[..., object]] = []  # each was installed before this guard's hook
        self._excepthook_depth = 0
        self.install_excepthook()
        os.register_at_fork(after_in_child=self._forget_in_fork)
        atexit.register(self._at_exit)
        threading.Thread(target=self._watch, name="weft-process-guard", daemon=True).start()

    def watch_children(self, children: Sequence[subprocess.Popen[Any]]) -> None:
        """End this process and all `children` when one of them fails; wait for `children` at a clean exit."""
        self._children = children

    def watch_parent(self, pid: int) -> None:
        """End this process when its parent, the process `pid`, has ended."""
        if sys.platform == "linux":
            # The kernel kills this process at once, even if it is stopped or a thread holds the GIL.
            if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
                raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
        if os.getppid() != pid:  # the parent ended before prctl took effect
            os._exit(1)
        self._parent_pid = pid

    def watch_signals(self, enabled: bool) -> None:
        """Set whether SIGINT and SIGTERM end the process within SIGNAL_GRACE_SECONDS.

        A deadline that an earlier signal has set remains: the teardown of a stopped run calls this method, too.
        """
        self._watches_signals = enabled
        self._limited = {}

    def limit_signals(self, signums: Sequence[int], seconds: float | None) -> None:
        """Set the time from these signals to the end of the tree, until the next `watch_signals`; None: no limit."""
        self._limited = dict.fromkeys(map(int, signums), seconds)

    def end_with(self, status: int) -> int:
        """Return the status with which this rank ends on purpose: `status`, or 0 for a child of a launcher.

        A child with another status would be taken for a failed one, and its tree ended, while the user sees only the
        status of the process that the launcher runs in.
        """
        if self._parent_pid is not None:
            return 0
        self._status = status
        return status

    def mark_failed(self, failed: bool) -> None:
        """Record whether this process ends because of an error, so that its exit waits for no other rank."""
        self._failed = failed

    def print_errors_once(self, reports: ErrorReports | None) -> None:
        """From now on, print one line for an error that `reports` contains; None: always print the traceback."""
        self._reports = reports

    def install_excepthook(self) -> None:
        """Install this guard's hook as sys.excepthook; it decides whether the previous hook prints.

        Call this method again after a process group is created, which installs another hook over this one.
        """
        if sys.excepthook != self._excepthook:
            self._excepthooks.append(sys.excepthook)
            sys.excepthook = self._excepthook

    def on_clean_exit(self, function: Callable[[], None]) -> None:
        """Call `function` at interpreter exit, unless this process failed: other ranks may have exited in that case.

        The function that was passed last is called first. One that is passed again is called once.
        """
        if function in self._on_clean_exit:
            self._on_clean_exit.remove(function)
        self._on_clean_exit.append(function)

    def before_executors_end(self, function: Callable[[], None]) -> None:
        """Call a function at a clean exit before those of `on_clean_exit`, while executors of threads still run.

        asyncio, with which packages of fsspec access object stores, resolves names in one. Python has no public hook
        for this; where it has none at all, the function is not called. One that is passed again is called once.
        """
        register = getattr(threading, "_register_atexit", None)
        if register is None or function in self._before_executors_end:
            return
        self._before_executors_end.append(function)
        importlib.import_module("concurrent.futures.thread")  # the hook that is registered last is called first
        register(self._at_clean_exit, function)

    def _at_clean_exit(self, function: Callable[[], None]) -> None:
        if os.getpid() == self._owner_pid and not self._failed:
            function()

    def fail_exit(self, error: Exception) -> None:
        """Inside a function of `on_clean_exit`: print an error, and end with status 1 after the other functions."""
        sys.excepthook(type(error), error, error.__traceback__)
        self._failed = True  # also if a hook of others does not call this guard's

    def _watch(self) -> None:
        while not self._ending:
            select.select([self._read_fd], [], [], _POLL_SECONDS)
            with contextlib.suppress(BlockingIOError):
                self._receive(os.read(self._read_fd, 64))
            if self._parent_pid is not None and os.getppid() != self._parent_pid:
                self._end(1)
            failed = [child for child in self._children if child.poll()]
            if failed and self._deadline is None:
                self._status = 1
                self._deadline = time.monotonic() + CHILD_GRACE_SECONDS
            if self._deadline is not None and time.monotonic() >= self._deadline:
                for child in failed:
                    _write_stderr(
                        f"the rank in process {child.pid} ended with status {child.returncode}; ending all ranks"
                    )
                self._end(self._status)

    def _receive(self, signums: bytes) -> None:
        if self._previous_wakeup_fd != -1:
            os.write(self._previous_wakeup_fd, signums)
        for signum in signums:
            is_watched = self._watches_signals and signum in _STOP_SIGNALS
            seconds = self._limited.get(signum, SIGNAL_GRACE_SECONDS if is_watched else None)
            if seconds is not None:
                self._status = 128 + signum
                self._deadline = min(self._deadline or float("inf"), time.monotonic() + seconds)

    def _excepthook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._failed = True
        # A hook that was installed over this one may call this one back: then the next older hook runs.
        is_outermost = self._excepthook_depth == 0
        hook = self._excepthooks[max(0, len(self._excepthooks) - 1 - self._excepthook_depth)]
        self._excepthook_depth += 1
        try:
            if is_outermost and self._reports is not None:
                self._reports.report(kind, error, trace, lambda: hook(kind, error, trace))
            else:
                hook(kind, error, trace)
        finally:
            self._excepthook_depth -= 1

    def _at_exit(self) -> None:
        if os.getpid() != self._owner_pid:
            return
        if self._failed:
            self._ending = True
            self._kill_children(after=CHILDREN_EXIT_SECONDS)
            # Destroying the group would join threads that may wait for ranks that have exited. Exit handlers that run
            # after this one may wait for such ranks, too.
            from weft._collectives import exit_after

            exit_after(timedelta(seconds=FAILED_EXIT_SECONDS), self._status)
            return
        try:
            with contextlib.ExitStack() as stack:  # calls the functions in reverse order, all even if one fails
                stack.callback(self._wait_for_children)
                for function in self._on_clean_exit:
                    stack.callback(function)
        finally:
            if self._failed:
                _flush()
                os._exit(self._status)

    def _wait_for_children(self) -> None:
        # NOTE: only after the group is destroyed, which releases children that are blocked in a collective.
        # The guard's thread still runs, and ends the tree if a child fails.
        for child in self._children:
            child.wait()
        self._ending = True

    def _kill_children(self, after: float = 0.0) -> None:
        deadline = time.monotonic() + after
        for child in self._children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, deadline - time.monotonic()))
        for child in self._children:
            child.kill()

    def _end(self, status: int) -> None:
        self._kill_children()
        # Another thread flushes: the main thread may be blocked in a write and hold the buffer's lock.
        flusher = threading.Thread(target=_flush, daemon=True)
        flusher.start()
        flusher.join(0.5)
        os._exit(status)

    def _forget_in_fork(self) -> None:
        # A forked worker shares this process's descriptors, and its signals must not reach this process's pipe.
        self._children = ()
        self._parent_pid = None
        self._reports = None
        signal.set_wakeup_fd(-1)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


def _write_stderr(text: str) -> None:
    os.write(2, f"weft: {text}\n".encode())


_guard: ProcessGuard | None = None
_guard_lock = threading.Lock()


def guard() -> ProcessGuard:
    """Return this process's guard, made at first use; if weft's launcher started this rank, it watches the parent."""
    global _guard  # noqa: PLW0603  (a process has one set of signals, one exit and one parent)
    with _guard_lock:
        if _guard is None:
            _guard = ProcessGuard()
            # Removed, because processes that this rank starts have another parent.
            launcher_pid = os.environ.pop(LAUNCHER_PID_VARIABLE, None)
            if launcher_pid is not None:
                _guard.watch_parent(int(launcher_pid))
            reports_path = os.environ.pop(ERROR_REPORTS_VARIABLE, None)
            if reports_path is not None:
                _guard.print_errors_once(ErrorReports.open(reports_path))
    return _guard


def watch_launcher() -> None:
    """Create the guard if a weft launcher started this process."""
    if LAUNCHER_PID_VARIABLE in os.environ:
        guard()
