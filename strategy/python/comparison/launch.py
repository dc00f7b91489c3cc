"""Runs a function on new ranks: CPU processes of this host, in a process group of the backend weft."""

from __future__ import annotations

import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

START_METHOD = "spawn"  # of multiprocessing, also for dry runs
_POLL_SECONDS = 0.5
_GRACE_SECONDS = 5.0


class _Answer(NamedTuple):
    """The content of the file that a rank writes when it ends.

    kind: "done", or for an error the kind that `encode_error` returns: "invalid" or "failed".
    content: the function's result, or the text of the error.
    time: when the rank ended, by the monotonic clock.
    """

    kind: str
    content: Any
    time: float


def launch(function: Callable[[Any], Any], argument: Any, num_ranks: int, timeout: float) -> Any:
    """Call `function(argument)` in each of `num_ranks` new processes and return the result of rank 0.

    The ranks' output goes to stderr. All ranks have ended when `launch` returns or raises.

    Raises:
        ValueError: weft's code raised a ValueError on a rank, or the function or argument cannot be pickled.
        TimeoutError: the ranks took longer than `timeout` seconds, and were killed.
        RuntimeError: a rank was killed, or raised any other error, whose traceback is in the text.
    """
    try:
        payload = pickle.dumps((function, argument))
    except Exception as error:  # __reduce__ of a user's object may raise anything
        raise ValueError(
            f"compare: the arguments cannot be sent to the ranks, which are new processes ({error}); pass a module, "
            "batch and loss_fn that can be pickled: functions at the top level of a file, or the "
            "'package.module:name' of one."
        ) from error
    with tempfile.TemporaryDirectory(prefix="weft-compare-") as folder:
        deadline = time.monotonic() + timeout
        context = mp.start_processes(
            _run_rank, (folder, num_ranks, payload, timeout), nprocs=num_ranks, join=False, daemon=True,
            start_method=START_METHOD,
        )  # fmt: skip
        exit_reason = ""
        try:
            while not context.join(timeout=_POLL_SECONDS, grace_period=_GRACE_SECONDS):
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"compare: {num_ranks} ranks did not end within {timeout:g} s; pass a longer timeout, fewer "
                        "steps, or first_layers."
                    )
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            exit_reason = str(error).strip()
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
                process.join()
        answers = [_read_answer(Path(folder, str(rank))) for rank in range(num_ranks)]
    failures = [answer for answer in answers if answer is not None and answer.kind != "done"]
    failures.sort(key=lambda answer: answer.time)
    user_errors = [answer.content for answer in failures if answer.kind == "invalid"]
    if user_errors:
        raise ValueError(user_errors[0])
    if failures:
        raise RuntimeError(f"compare: {failures[0].content}")
    if exit_reason or answers[0] is None:
        raise RuntimeError(
            f"compare: a rank ended without a result ({exit_reason}); check that all ranks fit into memory."
        )
    return answers[0].content


def _read_answer(path: Path) -> _Answer | None:
    if not path.is_file():
        return None
    answer: _Answer = pickle.loads(path.read_bytes())
    return answer


def _run_rank(rank: int, folder: str, num_ranks: int, payload: bytes, timeout: float) -> None:
    os.dup2(2, 1)  # the parent's stdout is for the result
    try:
        answer = _Answer("done", _call(rank, folder, num_ranks, payload, timeout), time.monotonic())
    except Exception as error:  # sent to the parent, which raises it
        answer = _Answer(*encode_error(rank, error), time.monotonic())
    Path(folder, f"{rank}.part").write_bytes(pickle.dumps(answer))
    os.replace(Path(folder, f"{rank}.part"), Path(folder, str(rank)))


def encode_error(rank: int, error: Exception) -> tuple[Literal["invalid", "failed"], str]:
    """Return the kind and text of a rank's error.

    They are "invalid" and the message for a ValueError that weft's code raised; "failed" and the traceback for any
    other error.
    """
    frames = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    if isinstance(error, ValueError) and frames[-1].startswith("weft."):
        return "invalid", str(error)
    text = "".join(traceback.format_exception(error))
    return "failed", f"rank {rank} raised {type(error).__name__}: {error}\n{text}"


def _call(rank: int, folder: str, num_ranks: int, payload: bytes, timeout: float) -> Any:
    import weft  # noqa: F401  (registers the backend)

    try:
        function, argument = pickle.loads(payload)
    except Exception as error:  # importing a user's module may raise anything
        raise ValueError(
            f"compare: the ranks, which are new processes, cannot load the arguments ({error}); define the module, "
            "batch and loss_fn in a file that can be imported, or pass the 'package.module:name' of each."
        ) from error
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // num_ranks))
    store = dist.FileStore(str(Path(folder, "store")), num_ranks)
    dist.init_process_group(
        "cpu:weft", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=timeout)
    )
    result = function(argument)
    dist.destroy_process_group()
    return result
