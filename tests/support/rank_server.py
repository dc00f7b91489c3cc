"""The process that ranks are forked from.

It imports torch and the other modules that the tests use once. It stays single-threaded and initialises nothing, so
that a fork is safe and takes milliseconds. Requests are JSON packets on a socket; a start carries one socket per rank:
    {"start": {"folder": str, "world_size": int}} + fds  -> {"pids": [int]}
    {"kill": [pid]}                                      -> {"status": {pid: exit status, negative: a signal}}
It ends when the other end of the socket is closed; the kernel kills the ranks when it ends.
"""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.metadata
import importlib.util
import json
import os
import signal
import socket
import sys
import traceback
from pathlib import Path

from support.processes import die_with_parent

MAX_RANKS = 16
MAX_PACKET_BYTES = 1 << 16
# For gc.set_threshold. The default of 700 objects takes up to a tenth of a test's CPU time.
COLLECTED_AT = (20_000, 20, 20)
# The modules that ranks are likely to import, in this order. A key of PRELOADED_IF_USED is preloaded only if the
# session has imported it, together with the modules that it loads at first use.
PRELOADED_ALWAYS = ("numpy", "torch", "torch.distributed", "torch.testing", "pytest")
PRELOADED_IF_USED = {
    "torch.distributed.tensor": (),
    "lightning.pytorch": (),
    "pytorch_lightning": (),
    "support.hugging_face": ("transformers.models.llama.modeling_llama",),
    "weft": ("weft.strategy.apply", "weft.strategy.verification.decide", "weft.strategy.pipeline"),
    "weft.lightning": (
        "weft.strategy.data_parallel",
        "weft.strategy.full_results",
        "weft.strategy.optimizers.fused_optimizers",
        "weft.strategy.planning.layout",
        "weft.strategy.reports.summary",
    ),
}


def serve(fd: int, parent_pid: int, search_path: list[str], used: list[str]) -> None:
    """Preload, send {"ready": true} or {"error": text}, then answer requests until the socket closes.

    `used` names the keys of PRELOADED_IF_USED to preload.
    """
    die_with_parent(parent_pid)
    control = socket.socket(fileno=fd)
    sys.path[:] = search_path
    # Each Trainer asks for the entry points of callbacks. Reading those of all packages takes 10 ms.
    importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)
    gc.disable()  # while modules are imported, which leaves little garbage: a tenth of the time
    try:
        _preload([*PRELOADED_ALWAYS, *(name for each in used for name in (each, *PRELOADED_IF_USED[each]))])
    except Exception:
        _reply(control, {"error": traceback.format_exc()})
        return
    # Exempt all existing objects from collection, so that a rank's collector does not write to the shared pages.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTED_AT)
    gc.enable()
    _reply(control, {"ready": True})
    while True:
        packet, fds, _, _ = socket.recv_fds(control, MAX_PACKET_BYTES, MAX_RANKS)
        if not packet:
            return
        request = json.loads(packet)
        if "start" in request:
            _reply(control, {"pids": _start_ranks(control, fds, **request["start"])})
        else:
            _reply(control, {"status": {pid: _kill(pid) for pid in request["kill"]}})


def _preload(names: list[str]) -> None:
    for name in names:
        if not _is_installed(name.partition(".")[0]):
            continue
        try:
            importlib.import_module(name)
        except Exception:
            if name.partition(".")[0] != "weft":
                raise
            # A broken build fails the tests that import weft, with this traceback; other tests still run.
            for loaded in [key for key in sys.modules if key.partition(".")[0] == "weft"]:
                del sys.modules[loaded]
        num_threads = len(list(Path("/proc/self/task").iterdir()))
        if num_threads != 1:
            raise RuntimeError(
                f"importing {name} started {num_threads - 1} threads, which a fork would lose; "
                "start them at first use instead"
            )


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # `without_optional` hides it
        return False


def _start_ranks(control: socket.socket, fds: list[int], folder: str, world_size: int) -> list[int]:
    pids = []
    server_pid = os.getpid()
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.setpgid(0, 0)
                die_with_parent(server_pid)
                control.close()
                for other in fds[:rank] + fds[rank + 1 :]:
                    os.close(other)
                from support.rank_process import run_rank

                run_rank(fds[rank], Path(folder), rank, world_size)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        pids.append(pid)
    for fd in fds:
        os.close(fd)
    return pids


def _kill(pid: int) -> int:
    # The rank has not been reaped yet, so its process id cannot have been reused.
    for target in (os.killpg, os.kill):
        try:
            target(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue  # it is not a group leader yet
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _reply(control: socket.socket, message: dict) -> None:
    control.send(json.dumps(message).encode()[:MAX_PACKET_BYTES])
