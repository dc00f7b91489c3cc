"""Writes this rank's flight record when a group fails: see `weft.flight`."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from weft import flight

_POLL_SECONDS = 0.2
_JOIN_SECONDS = 10.0  # for a record that is being written, perhaps to a file system that does not answer


class FlightWatch:
    """Watches the groups of this process in a thread, from its creation until `stop`.

    A rank that waits for a late rank gets an error. The late rank may be stuck in Python code, and get none: the thread
    writes its record. Only the first failure is recorded. At its creation, the record of an earlier run is moved to the
    folder `previous`.
    """

    def __init__(self, directory: Path, rank: int, num_ranks: int) -> None:
        self._directory = directory
        self._rank = rank
        self._num_ranks = num_ranks
        self._lock = threading.Lock()
        self._is_claimed = False  # by the thread that writes the record
        self._stopped = threading.Event()
        self._known_failures = set(flight.failures())  # of an earlier run in this process
        try:
            flight.set_aside(directory, rank)
        except OSError as problem:
            warnings.warn(f"weft: rank {rank} cannot move its old flight record: {problem}", stacklevel=2)
        self._thread = threading.Thread(target=self._watch, name="weft-flight-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching; wait at most 10 s for a record that is being written."""
        self._stopped.set()
        self._thread.join(_JOIN_SECONDS)

    def record(self, error: BaseException) -> None:
        """Write the record if the error, or one of its causes, is of communication."""
        if any(isinstance(each, dist.DistError) for each in _causes(error)):
            self._write(error)

    def _watch(self) -> None:
        while not self._stopped.wait(_POLL_SECONDS):
            if new := [text for text in flight.failures() if text not in self._known_failures]:
                # The main thread may be about to raise the failure: its record has the traceback.
                self._stopped.wait(_POLL_SECONDS)
                self._write("\n".join(new))
                return

    def _write(self, error: BaseException | str) -> None:
        with self._lock:
            if self._is_claimed:
                return
            self._is_claimed = True
        try:
            flight.write(self._directory, self._rank, self._num_ranks, error)
        except Exception as problem:  # must not hide the failure
            warnings.warn(f"weft: rank {self._rank} cannot write its flight record: {problem}", stacklevel=2)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, its cause, and so on, as a traceback shows them; each once."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        yield each
        seen.add(id(each))
        is_cause = each.__cause__ is not None or each.__suppress_context__
        each = each.__cause__ if is_cause else each.__context__
