"""Runs commands with a time limit; no process of a command outlives the call."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_MARK = "WEFT_GPU_PROCESS_MARK"
_GRACE_SECONDS = 3.0  # between SIGTERM and SIGKILL


@dataclass(frozen=True)
class Outcome:
    """How a command ended.

    Attributes:
        returncode: exit status, negative after a signal; None: the limit was reached.
        seconds: wall-clock time.
    """

    returncode: int | None
    seconds: float

    @property
    def timed_out(self) -> bool:
        return self.returncode is None


def run_limited(
    command: Sequence[str], *, seconds: float, log: Path, environment: Mapping[str, str], folder: Path
) -> Outcome:
    """Run a command in a process group of its own; write its output to `log`.

    After the limit the group gets SIGTERM, then SIGKILL. Afterwards all processes that the command started are killed,
    also those that have left the group: they are found by an environment variable.

    Raises:
        OSError: the command cannot be started.
    """
    mark = f"{_MARK}={uuid.uuid4().hex}"
    name, _, value = mark.partition("=")
    start = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**environment, name: value},
            cwd=folder,
            start_new_session=True,
        )
        returncode = None
        try:
            returncode = process.wait(timeout=max(0.0, seconds))
        except subprocess.TimeoutExpired:
            _signal_group(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=_GRACE_SECONDS)
        finally:
            _signal_group(process.pid, signal.SIGKILL)
            process.wait()
            _kill_marked(mark)
    return Outcome(returncode, time.monotonic() - start)


def _signal_group(leader: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(leader, number)


def _kill_marked(mark: str) -> None:
    """Kill processes with this environment variable until there are none: one may fork while the others are killed."""
    for _ in range(10):
        found = marked_processes(mark)
        if not found:
            return
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def marked_processes(mark: str) -> list[int]:
    """Return the ids of other processes whose environment contains `mark`, which has the form NAME=VALUE."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            environment = (entry / "environ").read_bytes()  # empty for a zombie
        except OSError:
            continue
        if mark.encode() in environment.split(b"\0"):
            found.append(int(entry.name))
    return found
