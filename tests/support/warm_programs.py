"""Runs Python programs in forks of a process that has imported torch, Lightning and weft, which takes 5 CPU seconds.

That process runs `next_program`. The fork that becomes a program has the environment, arguments, module
search path, standard streams, session and signal handlers of a new interpreter; `/proc` shows the token of its process
tree. The fork ends as an interpreter does, with its exit handlers. Its parent is the process that runs `next_program`.

A program may start `num_children` Python programs with `subprocess.Popen`, as Lightning's launcher does, or with
multiprocessing's start method "spawn". Their processes are forked before the program runs, so that they are its
children and have none of its state. All other uses of Popen start a new process.

A program that does not import a preloaded module still finds it: tests of imports need a new interpreter.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import json
import multiprocessing.util
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import CodeType
from typing import Any

from support.processes import TREE_VARIABLE, die_with_parent
from support.rank_server import COLLECTED_AT

MAX_PACKET_BYTES = 1 << 17
TOKEN_LENGTH = 32
_MAX_FDS = 16  # that a process of multiprocessing gets
# These packages, and the modules that they load at first use.
_PRELOADED = (
    "lightning.pytorch",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.utils.data",
    "weft.strategy.apply",
    "weft.strategy.data_parallel",
    "weft.strategy.optimizers.fused_optimizers",
    "weft.strategy.planning.layout",
    "weft.strategy.reports.summary",
    "weft.lightning",
)


def next_program(fd: int, search_path: list[str]) -> CodeType:
    """Serve requests on the socket `fd`; return, in a fork, the code that the fork must run in `__main__`.

    Requests are JSON packets, answered in order:
        {"command": [str], "env": {str: str}, "cwd": str, "num_children": int} + fds of stdout, stderr  -> {"pid": int}
        {"reap": pid}                                              -> {"status": exit status, negative: a signal}
    The process ends when the socket is closed; its programs end with it. `search_path`: sys.path of a new interpreter.
    """
    control = socket.socket(fileno=fd)
    gc.disable()  # as in `rank_server.serve`
    for name in _PRELOADED:
        importlib.import_module(name)
    num_threads = len(list(Path("/proc/self/task").iterdir()))
    if num_threads != 1:
        raise RuntimeError(f"the imports started {num_threads - 1} threads, which a fork would lose; preload less")
    gc.collect()
    gc.freeze()  # so that the programs' collectors do not write to the shared pages
    gc.set_threshold(*COLLECTED_AT)
    gc.enable()
    _send(control, {"ready": True})
    server_pid = os.getpid()
    while True:
        packet, fds, _, _ = socket.recv_fds(control, MAX_PACKET_BYTES, 2)
        if not packet:
            os._exit(0)
        request = json.loads(packet)
        if "reap" in request:
            _send(control, {"status": os.waitstatus_to_exitcode(os.waitpid(request["reap"], 0)[1])})
            continue
        pid = os.fork()
        if pid == 0:
            os.setsid()
            die_with_parent(server_pid)
            control.close()
            for target, source in enumerate((os.open(os.devnull, os.O_RDONLY), *fds)):
                os.dup2(source, target)
                os.close(source)
            return _program_with_children(request, search_path)
        for each in fds:
            os.close(each)
        _send(control, {"pid": pid})


def _program_with_children(request: dict[str, Any], search_path: list[str]) -> CodeType:
    """Fork the children; return the code of this program or, in a child that has been started, of that child."""
    waiting: list[tuple[int, socket.socket]] = []
    for _ in range(request["num_children"]):
        reader, writer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            for _, other in waiting:
                other.close()
            writer.close()
            packet, fds, _, _ = socket.recv_fds(reader, MAX_PACKET_BYTES, _MAX_FDS)
            if not packet:
                os._exit(0)  # the program has ended without starting this child
            reader.close()
            child = json.loads(packet)
            _place(fds, child.get("fds", ()))
            return _become(child, search_path)
        reader.close()
        waiting.append((pid, writer))

    def start(args: Any, env: Any, cwd: Any, fds: Sequence[int] = (), new_session: bool = False) -> int:
        """Start a waiting child, which gets the descriptors `fds` under the same numbers; return its process id."""
        pid, writer = waiting.pop(0)
        child = {"command": list(map(str, args)), "env": dict(os.environ if env is None else env), "fds": list(fds)}
        child |= {"cwd": os.fspath(cwd or os.getcwd()), "new_session": new_session}
        with writer:
            socket.send_fds(writer, [json.dumps(child).encode()], list(fds))
        return pid

    popen_child = subprocess.Popen._execute_child  # type: ignore[attr-defined]

    def execute_child(self: Any, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, *rest: Any) -> None:
        """Start one of the waiting children for a Python program without pipes."""
        pass_fds, cwd, env, _, _, shell, *pipes = rest[:12]
        is_python = isinstance(args, (list, tuple)) and args[0] == sys.executable
        if waiting and is_python and not (shell or executable or preexec_fn or pass_fds) and set(pipes) == {-1}:
            self.pid = start(args, env, cwd, new_session=True in rest[12:])
            self._child_created = True
        else:
            popen_child(self, args, executable, preexec_fn, close_fds, *rest)

    spawn = multiprocessing.util.spawnv_passfds

    def spawnv_passfds(path: Any, args: Sequence[Any], passfds: Sequence[int]) -> int:
        """Start one of the waiting children for a process of multiprocessing."""
        if waiting and args[-1] == "--multiprocessing-fork" and set(args[1:-3]) <= {"-B"}:  # this process has it, too
            return start([os.fsdecode(path), *args[-3:]], None, None, passfds)
        return spawn(path, args, passfds)

    # NOTE: not a new class in the module: torchrun has imported the class by its name.
    subprocess.Popen._execute_child = execute_child  # type: ignore[attr-defined]
    multiprocessing.util.spawnv_passfds = spawnv_passfds
    return _become(request, search_path)


def _place(fds: Sequence[int], numbers: Sequence[int]) -> None:
    """Give descriptors these numbers."""
    above = [fcntl.fcntl(fd, fcntl.F_DUPFD, max(numbers, default=0) + 1) for fd in fds]
    for fd in fds:
        os.close(fd)
    for fd, number in zip(above, numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)


def _become(request: dict[str, Any], search_path: list[str]) -> CodeType:
    """Give this process the state of a new interpreter with this command; return the program's code."""
    if sys.modules.get("triton") is not None:
        # Else triton reports leaks. Without triton, the end of the interpreter need not traverse all objects of the
        # imports, which takes a CPU second.
        atexit.register(gc.unfreeze)
    if request.get("new_session"):
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["env"])
    _show_token(request["env"][TREE_VARIABLE])
    os.chdir(request["cwd"])
    for name, fd, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        stream = os.fdopen(fd, mode, buffering=1 if name == "stderr" else -1, closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    arguments = [each for each in request["command"][1:] if each != "-u"]
    folders = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    if arguments[0] in ("-c", "-m"):
        kind, text, *rest = arguments
        sys.argv, sys.path[:] = [kind, *rest], ["" if kind == "-c" else os.getcwd(), *folders, *search_path]
        if kind == "-m":
            text = f"import runpy; runpy.run_module({text!r}, run_name='__main__', alter_sys=True)"
        code = compile(text, "<string>", "exec", dont_inherit=True)
    else:
        path = Path(arguments[0])
        sys.argv, sys.path[:] = arguments, [str(path.resolve().parent), *folders, *search_path]
        sys.modules["__main__"].__file__ = str(path)
        code = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    # Importing weft.lightning does the same in a child of weft's launcher.
    sys.modules["weft._plugin.process_guard"].watch_launcher()
    return code


def _show_token(token: str) -> None:
    """Overwrite the token in the environment with which this process was started, which /proc shows."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])
    name = f"{TREE_VARIABLE}=".encode()
    offset = ctypes.string_at(start, end - start).index(name) + len(name)
    assert len(token) == TOKEN_LENGTH
    ctypes.memmove(start + offset, token.encode(), TOKEN_LENGTH)


def _send(control: socket.socket, message: dict[str, object]) -> None:
    control.send(json.dumps(message).encode())
