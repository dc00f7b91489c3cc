"""Writes this rank's flight record when a group fails: see `weft.flight`."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path

import torch.distributed as dist

from weft import flight

_POLL_SECONDS = 0.2


class FlightWatch:
    """Watches the groups of this process in a thread, from its creation until `stop`.

    A rank that waits for a late rank gets an error. The late rank may be stuck in Python code, and get none: the thread
    writes its record. Only the first failure is recorded.
    """

    def __init__(self, directory: Path, rank: int, num_ranks: int) -> None:
        self._directory = directory
        self._rank = rank
        self._num_ranks = num_ranks
        self._lock = threading.Lock()
        self._is_written = False
        self._stopped = threading.Event()
        self._known_failure = flight.failure()  # of an earlier run in this process
        self._thread = threading.Thread(target=self._watch, name="weft-flight-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def record(self, error: BaseException) -> None:
        """Write the record if the error, or one of its causes, is of communication."""
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, dist.DistError):
                self._write(error)
                return
            cause = cause.__cause__ or cause.__context__

    def _watch(self) -> None:
        while not self._stopped.wait(_POLL_SECONDS):
            text = flight.failure()
            if text and text != self._known_failure:
                self._write(text)
                return

    def _write(self, error: BaseException | str) -> None:
        with self._lock:
            if not self._is_written:
                self._is_written = True
                try:
                    flight.write(self._directory, self._rank, self._num_ranks, error)
                except OSError as problem:  # must not hide the failure
                    warnings.warn(f"weft: rank {self._rank} cannot write its flight record: {problem}", stacklevel=2)
