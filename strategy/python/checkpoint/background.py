"""Writes a checkpoint in the background, while training goes on; one at a time in a process.

Training stops only while all ranks plan the save and copy their chunks into CPU memory. Then a thread of each rank
writes the rank's file and, when that is stored, reports its chunks in the store of the process group. The thread
of the first rank waits for the reports of all ranks, writes the manifest, and makes the files the checkpoint. So the
threads start no collective, which could be confused with one of the training, and a full disk hinders no report.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from weft.strategy.agreement import name_start
from weft.strategy.checkpoint.directory import on_all_ranks, on_first_rank, plan_save, write_manifest
from weft.strategy.checkpoint.host_copies import HostCopies
from weft.strategy.checkpoint.locations import Location, Where, location_of
from weft.strategy.checkpoint.manifest import chunk_from_json, chunk_to_json, file_from_json, file_to_json
from weft.strategy.checkpoint.writing import Encoded, Placed

_POLL_SECONDS = 0.05
_MAX_STORED = 1 << 20  # characters of one entry of the store; a client loses its connection with one of 16 Mi


class _Process:
    """The state of this process: the save in flight, the memory of copies, and the number of saves."""

    def __init__(self) -> None:
        self.current: _Save | None = None
        self.copies = HostCopies()
        self.num_saves = 0


_process = _Process()


def start(
    location: Where,
    written: Where,
    state: Mapping[str, Any],
    rest: Mapping[str, Any],
    about: Mapping[str, Any],
    seconds: float,
) -> tuple[str, ...]:
    """Copy a state into CPU memory, and write it as the checkpoint `location` in the background; collective.

    The save before must have ended; see `wait`. Later changes of the arguments change nothing in the checkpoint.

    Args:
        location: the path or URL that the checkpoint gets when it is complete.
        written: where the files are written until then, as `begin` returns it.
        state, rest, about: as in `save`.
        seconds: how long the first rank waits for the files of the others when its own is written.

    Returns:
        On the first rank, the paths of the values that are pickled because JSON cannot carry them; else ().

    Raises:
        RuntimeError: a rank could not copy its chunks.
    """
    _process.num_saves += 1
    _process.current = _Save(location_of(location), location_of(written), state, rest, about, seconds)
    return _process.current.pickled


def wait(*, raises: bool = True) -> None:
    """Wait until the save in flight, if any, has its name; collective.

    Raises:
        Exception: it has failed, on a rank that could not write with that rank's error, else a RuntimeError; with
            `raises` False, a warning says so.
    """
    current = _process.current
    if current is None:
        return
    try:
        on_all_ranks("save", current.location, current.join)
    except Exception as error:
        if raises:
            raise
        warnings.warn(f"weft: {error}", stacklevel=2)
    finally:
        if current.has_ended:  # not after a KeyboardInterrupt: the thread uses the copies
            _process.current = None


def join() -> None:
    """Wait until this rank's part of the save in flight is written, on the first rank all parts; not collective.

    Raises:
        Exception: this rank could not write; on the first rank, a rank could not.
    """
    if (current := _process.current) is not None:
        current.join()
        if current.error_of_others is not None:
            raise current.error_of_others


def free_copies() -> None:
    """Free the memory of the copies, if no save is in flight; not collective."""
    if _process.current is None:
        _process.copies.free()


def is_writing(where: Where) -> bool:
    """Return whether the save that no rank has waited for yet is of this path or URL; the same on all ranks."""
    if _process.current is None:
        return False
    one, other = _process.current.location, location_of(where)
    if one.is_local and other.is_local:
        return os.path.abspath(str(one)) == os.path.abspath(str(other))
    return str(one) == str(other)


def call_later(call: Callable[[], None]) -> None:
    """Call a function when the save in flight has its name, or now if there is none; not called if it fails.

    So a crash leaves the checkpoint that the function removes, until the new one is complete.
    """
    if _process.current is None:
        call()
    else:
        _process.current.call_later(call)


class _Save:
    """A save whose files are being written. The constructor is collective.

    Attributes:
        location, pickled: see `start`.
        has_ended: the thread uses the copies no more.
        error_of_others: on the first rank, why another rank could not write.
    """

    def __init__(
        self,
        location: Location,
        written: Location,
        state: Mapping[str, Any],
        rest: Mapping[str, Any],
        about: Mapping[str, Any],
        seconds: float,
    ) -> None:
        self.location = location
        self.pickled: tuple[str, ...] = ()
        self.has_ended = False
        self.error_of_others: RuntimeError | None = None
        self._written = written
        self._about = dict(about)
        self._seconds = seconds
        self._rank, self._num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self._store = None
        if self._num_ranks > 1:
            store = dist.distributed_c10d._get_default_store()  # torch has no public function for it
            # The name of the start, because a save that was killed may have left its reports in the store.
            self._store = dist.PrefixStore(f"weft save {name_start()} {_process.num_saves}", store)
        self._error: Exception | None = None
        self._later: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._writer = plan_save(written, state, _process.copies.copy)
        self._rest: Encoded | None = on_first_rank("save", location, lambda: Encoded.of(dict(rest), ""))
        if self._rest is not None:
            values = (encoded for _, encoded in self._writer.values.values())
            self.pickled = tuple(name for each in (*values, self._rest) for name, _ in each.objects)
        # A daemon, so that a rank that fails ends without waiting for others.
        self._thread = threading.Thread(target=self._run, name="weft-save", daemon=True)
        self._thread.start()

    def call_later(self, call: Callable[[], None]) -> None:
        with self._lock:
            if not self.has_ended:
                self._later.append(call)
                return
        if not self._has_failed():
            call()

    def join(self) -> None:
        """Wait for the thread of this rank; raise this rank's own error."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _has_failed(self) -> bool:
        return self._error is not None or self.error_of_others is not None

    def _run(self) -> None:
        try:
            self._write()
        except BaseException as error:
            self._error = error if isinstance(error, Exception) else RuntimeError(repr(error))
        with self._lock:
            self.has_ended = True
            later, self._later = self._later, []
        try:
            for call in later if not self._has_failed() else ():
                call()
        except Exception as error:  # the new checkpoint is there, and the old one, too
            self._error = error

    def _write(self) -> None:
        try:
            placed = self._writer.write()
        except BaseException as error:
            if self._rank > 0:
                with contextlib.suppress(dist.DistError):  # the first rank has ended
                    self._report({"error": f"{type(error).__name__}: {error}"})
            raise
        if self._rank > 0:
            self._report({"files": _files(placed), "chunks": _chunks(placed)})
            return
        reports = self._reports()
        failed = next(((rank, each["error"]) for rank, each in enumerate(reports, 1) if "error" in each), None)
        if failed is not None:
            self.error_of_others = RuntimeError(
                f"rank {failed[0]} failed to save the checkpoint {str(self.location)!r} ({failed[1]}); remove the "
                "cause, and save again."
            )
            return
        assert self._rest is not None
        write_manifest(self._writer, [placed, *map(_placed, reports)], self._rest, self._about)
        self._written.publish_as(self.location)

    def _report(self, content: dict[str, Any]) -> None:
        assert self._store is not None
        text = json.dumps(content)
        parts = [text[start : start + _MAX_STORED] for start in range(0, len(text), _MAX_STORED)]
        for idx, part in enumerate(parts):
            self._store.set(f"{self._rank}/{idx}", part)
        self._store.set(str(self._rank), str(len(parts)))

    def _reports(self) -> list[dict[str, Any]]:
        """Return the reports of the other ranks, when all are there; on the first rank."""
        deadline = time.monotonic() + self._seconds
        reports = []
        for rank in range(1, self._num_ranks):
            assert self._store is not None
            while not self._store.check([str(rank)]):
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"rank {rank} did not write its part of the checkpoint {str(self.location)!r} within "
                        f"{self._seconds:g} seconds after rank 0 had; pass a longer timeout to the strategy, or save "
                        "to a faster disk."
                    )
                time.sleep(_POLL_SECONDS)
            keys = [f"{rank}/{idx}" for idx in range(int(self._taken(str(rank))))]
            reports.append(json.loads(b"".join(map(self._taken, keys))))
        return reports

    def _taken(self, key: str) -> bytes:
        """Return an entry of the store, and delete it."""
        assert self._store is not None
        value: bytes = self._store.get(key)
        self._store.delete_key(key)
        return value


def _files(placed: Placed) -> dict[str, Any]:
    return {name: file_to_json(file) for name, file in placed.files.items()}


def _chunks(placed: Placed) -> list[Any]:
    return [[name, chunk.blocks.itemsize, chunk_to_json(chunk)] for name, chunk in placed.chunks]


def _placed(report: dict[str, Any]) -> Placed:
    chunks = tuple((name, chunk_from_json(chunk, itemsize)) for name, itemsize, chunk in report["chunks"])
    return Placed({name: file_from_json(file) for name, file in report["files"].items()}, chunks)
