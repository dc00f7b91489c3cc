"""Flight records: the newest calls and the Python stacks of each rank, written to a directory after a failure.

Each rank writes one JSON file. `report` compares the files of all ranks, and names the ranks that are missing in the
first call that did not complete; `draw` draws the calls. `weft flight DIRECTORY` does both.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from weft import _collectives

__all__ = ["calls", "failures", "read", "set_aside", "write"]

_PATTERN = "flight-rank-*.json"
_KEYS = {"rank", "num_ranks", "host", "pid", "time", "error", "writer", "calls", "stacks"}


def calls() -> list[dict[str, Any]]:
    """Return this process's newest 512 calls to groups of the backend `weft`, the oldest first; see `read`."""
    return _collectives.flight_log()


def failures() -> list[str]:
    """Return the texts of the failures of the groups of the backend `weft` that this process has not left.

    A group fails on all ranks, also on those that make no call. On a host where no rank is in a call of the group, the
    failure is seen with the next call.
    """
    return _collectives.failures_of_groups()


def write(directory: str | os.PathLike[str], rank: int, num_ranks: int, error: BaseException | str) -> Path:
    """Write this rank's record, `flight-rank-00000.json`, and return its path; replaces an earlier one.

    For torch's analyser, also writes the record of torch's own flight recorder, `torch/rank_0`, where torch is 2.15 or
    newer: `python -m torch.distributed.flight_recorder.fr_trace DIRECTORY/torch -p rank_`.

    Args:
        directory: is created if it does not exist.
        rank: the global rank.
        num_ranks: of the job.
        error: the cause, whose text and traceback are recorded.
    """
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(traceback.format_exception(error)) if isinstance(error, BaseException) else error
    record = {
        "rank": rank,
        "num_ranks": num_ranks,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "time": time.time(),
        "error": text,
        "writer": threading.current_thread().name,
        "calls": calls(),
        "stacks": _stacks(),
    }
    path = _record_path(folder, rank)
    _replace(path, json.dumps(record, indent=1).encode())
    if (trace := _torch_trace()) is not None:
        trace_path = _trace_path(folder, rank)
        trace_path.parent.mkdir(exist_ok=True)
        _replace(trace_path, trace)
    return path


def set_aside(directory: str | os.PathLike[str], rank: int) -> None:
    """Move this rank's record of an earlier run, if there is one, to `DIRECTORY/previous`; replaces an earlier one.

    Raises:
        OSError: the record cannot be moved.
    """
    folder = Path(directory)
    for path in (_record_path(folder, rank), _trace_path(folder, rank)):
        if path.exists():
            target = folder / "previous" / path.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            path.replace(target)


def read(directory: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the records in a directory, by rank.

    Each has "rank", "num_ranks", "host", "pid", "time" (in seconds since 1970), "error" (a text), "writer" (the thread
    that has written the record), "stacks" (by thread, lists of lines) and "calls", the oldest first. Each call has
    "group" (a name), "ranks" (the global ranks of the group), "sequence" (of the group's collectives, from 1; 0: a
    message), "call" (a text), "bytes", "state" ("started", "done" or "failed"), "begin" and "end" (in seconds since
    1970; the end is None while a call has not ended).

    A peer in the text of a message is a global rank; a root in that of a collective is a rank of the group. Errors
    number the tensors of coalesced calls one by one, so that "(collective N of the group)" may exceed the "sequence".

    Raises:
        FileNotFoundError: the directory has no records.
        ValueError: a file is no record.
    """
    paths = sorted(Path(directory).glob(_PATTERN))
    if not paths:
        raise FileNotFoundError(f"{str(directory)!r} has no flight records; pass a directory with {_PATTERN}.")
    records = []
    for path in paths:
        try:
            record = json.loads(path.read_text())
        except ValueError as error:
            raise ValueError(f"{str(path)!r} is no flight record ({error}); remove it.") from None
        if not isinstance(record, dict) or _KEYS - record.keys():
            raise ValueError(f"{str(path)!r} is no flight record (keys are missing); remove it.")
        records.append(record)
    return sorted(records, key=lambda record: record["rank"])


def _record_path(folder: Path, rank: int) -> Path:
    return folder / f"flight-rank-{rank:05}.json"


def _trace_path(folder: Path, rank: int) -> Path:
    return folder / "torch" / f"rank_{rank}"


def _stacks() -> dict[str, list[str]]:
    """Return the stack of each Python thread, the innermost frame last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        f"{names.get(ident, 'unknown')} ({ident})": [line.rstrip() for line in traceback.format_stack(frame)]
        for ident, frame in sys._current_frames().items()
    }


def _torch_trace() -> bytes | None:
    """Return the record of torch's flight recorder for the backend weft, pickled; None: torch has none."""
    from torch._C import _distributed_c10d as c10d

    with contextlib.suppress(AttributeError, TypeError):  # a function, and its argument, of newer releases
        trace: bytes = c10d._dump_fr_trace(backend="weft")
        return trace
    return None


def _replace(path: Path, content: bytes) -> None:
    partial = path.with_name(f".{path.name}.{threading.get_ident()}.partial")
    partial.write_bytes(content)
    partial.replace(path)
