"""An error of several ranks is printed once, errors that differ are all printed, and no traceback is lost."""

from __future__ import annotations

import functools
import io
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist
import torch.distributed.tensor  # noqa: F401  (preloaded for the ranks, which need it between two cases)

from support.ranks import on_ranks
from weft._plugin import error_reports
from weft._plugin.error_reports import ErrorReports


def _shared_log(rank: int) -> ErrorReports:
    reports = ErrorReports.create() if rank == 0 else None
    path = [reports.path if reports is not None else None]
    dist.broadcast_object_list(path, src=0)
    log = reports or ErrorReports.open(path[0])
    assert log is not None
    dist.barrier()
    return log


@contextmanager
def _stderr(path: Path) -> Iterator[None]:
    before = sys.stderr
    with path.open("a") as file:
        sys.stderr = file
        try:
            yield
        finally:
            sys.stderr = before


def _report(log: ErrorReports, fail: Callable[[], None], show: Callable[..., None] = traceback.print_exception) -> None:
    """Report the error of `fail` as the interpreter reports an uncaught exception."""
    try:
        fail()
    except Exception as error:
        log.report(type(error), error, error.__traceback__, functools.partial(show, error))


def _fails(text: str) -> None:
    raise ValueError(text)


def _fails_elsewhere(text: str) -> None:
    raise ValueError(text)


def _fails_with_cause(text: str) -> None:
    try:
        _fails(text)
    except ValueError as error:
        raise ValueError("raised on every rank") from error


def _fails_identically() -> None:
    _fails("raised on every rank")


class _Object:
    """Its repr contains its address."""


# Case -> (a function that raises the error of the rank that it is called with, the number of printed tracebacks).
ERRORS: dict[str, tuple[Callable[[int], None], int]] = {
    "the same": (lambda rank: _fails("raised on every rank"), 1),
    "the same, of objects at other addresses": (lambda rank: _fails(f"{_Object()} and {hex(id(rank) + rank)}"), 1),
    "another text": (lambda rank: _fails(f"rank {rank} raises this"), 2),
    "another line": (lambda rank: (_fails, _fails_elsewhere)[rank]("raised on every rank"), 2),
    "another cause": (lambda rank: _fails_with_cause(f"rank {rank} raises this"), 2),
}


@on_ranks(2)
@pytest.mark.parametrize("case", ERRORS)
def test_identical_errors_are_printed_once(rank: int, tmp_path: Path, case: str) -> None:
    fail, num_tracebacks = ERRORS[case]
    log = _shared_log(rank)
    with _stderr(tmp_path / "stderr"):
        _report(log, lambda: fail(rank))
    dist.barrier()
    text = (tmp_path / "stderr").read_text()
    assert len(re.findall(r"^  File .*in _report$", text, re.MULTILINE)) == num_tracebacks
    lines = re.findall(r"^weft: rank (\d) raised the same ValueError as rank (\d): see its traceback\.$", text, re.M)
    assert len(lines) == 2 - num_tracebacks and all(set(pair) == {"0", "1"} for pair in lines)


@on_ranks(2)
def test_separate_stderr_gets_traceback(rank: int, tmp_path: Path) -> None:
    log = _shared_log(rank)
    with _stderr(tmp_path / f"stderr-{rank}"):
        _report(log, _fails_identically)
    assert "Traceback" in (tmp_path / f"stderr-{rank}").read_text()


def _forked(log: ErrorReports, show: Callable[[], None]) -> int:
    """Fork another rank that reports an error; return its process id when it has the turn and runs `show`."""
    reader, writer = os.pipe()
    path, pid = log.path, os.fork()
    if pid == 0:
        try:
            _report(ErrorReports.open(path), _fails_identically, lambda _: (os.write(writer, b"."), show()))
        finally:
            os._exit(0)
    assert os.read(reader, 1) == b"."
    os.close(reader)
    os.close(writer)
    return pid


def _cannot_print() -> None:
    raise OSError("no space left")


@on_ranks(1)
@pytest.mark.parametrize("case", ["is killed", "fails to print", "never ends", "prints"])
def test_next_rank_prints_if_first_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    monkeypatch.setattr(error_reports, "TURN_SECONDS", 5.0 if case == "is killed" else 0.3)
    log = ErrorReports.create()
    shows = {"is killed": signal.pause, "never ends": signal.pause, "fails to print": _cannot_print, "prints": int}
    with _stderr(tmp_path / "stderr"):
        pid = _forked(log, shows[case])
        if case != "never ends":
            if case == "is killed":
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        _report(log, _fails_identically)
        if case == "never ends":
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    assert ("Traceback" in (tmp_path / "stderr").read_text()) == (case != "prints")


@on_ranks(1)
def test_notebook_rank_prints_every_traceback() -> None:
    """A notebook's sys.stderr has no file descriptor, so ranks cannot tell whether they share a file."""
    log, before = ErrorReports.create(), sys.stderr
    for _ in range(2):
        sys.stderr = io.StringIO()
        try:
            _report(log, _fails_identically)
            assert "Traceback" in sys.stderr.getvalue()
        finally:
            sys.stderr = before


def test_open_of_ended_process_returns_none() -> None:
    assert ErrorReports.open("/proc/1/fd/none") is None
