"""The tests' side of `warm_programs`: starts its process and, through that, programs."""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from support.processes import TREE_VARIABLE, WITHOUT_OPTIONAL
from support.warm_programs import MAX_PACKET_BYTES, TOKEN_LENGTH

_TESTS_FOLDER = Path(__file__).parents[1]
_START_SECONDS = 240.0  # importing torch and Lightning from a cold disk takes this long
_BOOTSTRAP = """
import sys
sys.path.insert(0, {tests!r})
exec(__import__("support.warm_programs").warm_programs.next_program({fd}, sys.path[2:]))
"""


class WarmProcess:
    """A program that the server has started, with the methods of Popen that `ProcessTree` uses."""

    def __init__(self, server: WarmServer, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server
        self._pidfd = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal, or None if the program is running."""
        return self._wait(0.0)

    def wait(self, timeout: float) -> int:
        """Return the exit status; raise TimeoutExpired if the program is running after `timeout` seconds."""
        status = self._wait(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return status

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._pidfd, signum)

    def _wait(self, timeout: float) -> int | None:
        if self.returncode is None and select.select([self._pidfd], [], [], timeout)[0]:
            self.returncode = self._server.request({"reap": self.pid})["status"]
            os.close(self._pidfd)
        return self.returncode


class WarmServer:
    """The process that programs are forked from; it starts with the first of them.

    `has_optional_packages`: whether it and its programs can import the packages that `without_optional` hides.
    """

    def __init__(self, has_optional_packages: bool) -> None:
        self._has_optional_packages = has_optional_packages
        self._lock = threading.Lock()
        self._control: socket.socket | None = None

    def start(
        self, command: Sequence[str], env: Mapping[str, str], cwd: str, num_children: int, streams: Sequence[IO[bytes]]
    ) -> WarmProcess:
        """Start a Python program; `streams` are its stdout and stderr."""
        request = {"command": list(command), "env": dict(env), "cwd": cwd, "num_children": num_children}
        return WarmProcess(self, self.request(request, [stream.fileno() for stream in streams])["pid"])

    def request(self, message: dict[str, Any], fds: Sequence[int] = ()) -> dict[str, Any]:
        with self._lock:
            if self._control is None:
                self._open()
            socket.send_fds(self._control, [json.dumps(message).encode()], fds)
            return self._receive(_START_SECONDS)

    def close(self) -> None:
        """End the server and all programs."""
        if self._control is not None:
            self._control.close()
            self._control = None
            self._process.wait()

    def _open(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - as long-lived as the server
        hiding = [] if self._has_optional_packages else [str(WITHOUT_OPTIONAL)]
        search_path = [*hiding, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", TREE_VARIABLE: "0" * TOKEN_LENGTH}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BOOTSTRAP.format(tests=str(_TESTS_FOLDER), fd=theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env={**environment, "PYTHONPATH": os.pathsep.join(search_path)},
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        self._receive(_START_SECONDS)

    def _receive(self, timeout: float) -> dict[str, Any]:
        assert self._control is not None
        readable, _, _ = select.select([self._control], [], [], timeout)
        packet = self._control.recv(MAX_PACKET_BYTES) if readable else b""
        if not packet:
            self._log.seek(0)
            text = self._log.read().decode(errors="replace")
            raise RuntimeError(f"the process with warm programs ended or did not answer; its output was:\n{text}")
        return json.loads(packet)


SERVERS = {has_optional_packages: WarmServer(has_optional_packages) for has_optional_packages in (False, True)}
for server in SERVERS.values():
    atexit.register(server.close)
