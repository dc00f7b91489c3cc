"""Rank pools, as the test process manages them: the server that forks ranks, and pools of ranks."""

from __future__ import annotations

import atexit
import json
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path

from support.processes import on_busy_machine
from support.rank_process import STACK_SIGNAL
from support.rank_server import MAX_PACKET_BYTES, MAX_RANKS, PRELOADED_IF_USED

_TESTS_FOLDER = Path(__file__).parents[1]
_START_SECONDS = 120.0  # importing torch and Lightning from a cold disk takes this long
_RESET_SECONDS = 15.0
_GRACE_SECONDS = 2.0  # after one rank has failed, the time for other ranks to fail too
_STACK_SECONDS = 2.0
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
# Copied at import, before any test can change it.
_ENVIRONMENT = {**os.environ, **_ONE_THREAD, "GLOO_SOCKET_IFNAME": "lo"}


class RankFailure(AssertionError):
    """At least one rank failed, died or timed out; the text describes each, the earliest failure first."""


class RanksSkipped(Exception):
    """Every rank called pytest.skip; the text is the reason."""


@dataclass(frozen=True)
class Case:
    """The data with which a rank finds and calls a function: see `rank_process._run_case`."""

    path: str
    module: str
    qualname: str
    arguments: bytes  # a pickled dict; unpickling needs the module to be loaded
    wanted: tuple[str, ...]  # which of "rank" and "world_size" the function takes
    keeps_groups: bool = False  # whether the next case on these ranks finds this one's sub-groups and meshes


@dataclass
class _Answers:
    """The ranks' replies by rank; `silent` are the ranks that did not reply in time."""

    replies: dict[int, dict] = field(default_factory=dict)
    silent: list[int] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.silent and all(reply["outcome"] == "passed" for reply in self.replies.values())


class RankServer:
    """Starts and kills ranks through the process of `rank_server`."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control = ours
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - as long-lived as the server
        used = [name for name in PRELOADED_IF_USED if name in sys.modules]
        bootstrap = (
            f"import sys; sys.path.insert(0, {str(_TESTS_FOLDER)!r}); from support.rank_server import serve; "
            f"serve({theirs.fileno()}, {os.getpid()}, {sys.path!r}, {used!r})"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", bootstrap],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=_ENVIRONMENT,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # the test process handles Ctrl-C in the terminal
        )
        theirs.close()
        ready = self._receive()
        if "error" in ready:
            self.close()
            raise RuntimeError(f"the rank server could not preload what the ranks need:\n{ready['error']}")

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def start(self, folder: Path, world_size: int) -> tuple[list[int], list[Connection]]:
        """Fork `world_size` ranks; return their process ids and the connections to them, by rank."""
        pairs = [socket.socketpair() for _ in range(world_size)]
        packet = json.dumps({"start": {"folder": str(folder), "world_size": world_size}}).encode()
        socket.send_fds(self._control, [packet], [theirs.fileno() for _, theirs in pairs])
        for _, theirs in pairs:
            theirs.close()
        pids = self._receive()["pids"]
        return pids, [Connection(ours.detach()) for ours, _ in pairs]

    def kill(self, pids: list[int]) -> dict[int, int]:
        """Kill and reap the ranks; return {pid: exit status}, -9 for those that this call killed."""
        self._control.send(json.dumps({"kill": pids}).encode())
        return {int(pid): status for pid, status in self._receive()["status"].items()}

    def close(self) -> None:
        self._control.close()
        self._process.kill()
        self._process.wait()
        self._log.close()

    def _receive(self) -> dict:
        readable, _, _ = select.select([self._control], [], [], _START_SECONDS)
        packet = self._control.recv(MAX_PACKET_BYTES) if readable else b""
        if not packet:
            self._log.seek(0)
            text = self._log.read().decode(errors="replace")
            why = "ended" if readable else f"did not answer for {_START_SECONDS:g} s"
            self.close()
            raise RuntimeError(f"the rank server {why}; its output was:\n{text}")
        return json.loads(packet)


class RankPool:
    """`world_size` processes of one process group that run cases."""

    def __init__(self, server: RankServer, world_size: int) -> None:
        self.world_size = world_size
        self.is_alive = True
        self._server = server
        self._folder = tempfile.TemporaryDirectory(prefix="weft-ranks-")
        self._log_starts = [0] * world_size
        self.pids, self._connections = server.start(Path(self._folder.name), world_size)
        answers = self._collect(_START_SECONDS)
        if not answers.passed:
            raise RankFailure(self._stop(answers, "joining the process group", _START_SECONDS))

    def run(self, case: Case, timeout: float) -> list[object]:
        """Run `case` on every rank and return the results by rank. A failure closes the pool."""
        timeout = on_busy_machine(timeout)
        try:
            self._log_starts = [self._log(rank).stat().st_size for rank in range(self.world_size)]
            self._send(pickle.dumps(vars(case)))
            answers = self._collect(timeout)
            skips = [r["text"] for r in answers.replies.values() if r["outcome"] == "skipped"]
            if not answers.passed and len(skips) != self.world_size:
                raise RankFailure(self._stop(answers, case.qualname, timeout))
            self._send(pickle.dumps(None))
            reset_seconds = on_busy_machine(_RESET_SECONDS)
            between = self._collect(reset_seconds)
            if not between.passed:
                what = f"the barrier after {case.qualname}, which left its ranks out of step,"
                raise RankFailure(self._stop(between, what, reset_seconds, location=f" in {what}"))
            if skips:
                raise RanksSkipped(skips[0])
            return [pickle.loads(answers.replies[rank]["value"]) for rank in range(self.world_size)]
        except RanksSkipped:
            raise
        except BaseException:  # including an interrupt: the ranks are still inside the case
            self.close()
            raise

    def close(self) -> dict[int, int]:
        """Kill the ranks; return {rank: exit status}, empty if the pool was closed already."""
        if not self.is_alive:
            return {}
        self.is_alive = False
        for connection in self._connections:
            connection.close()
        statuses = self._server.kill(self.pids) if self._server.is_alive else {}
        self._folder.cleanup()
        return {rank: statuses[pid] for rank, pid in enumerate(self.pids) if pid in statuses}

    def _send(self, packet: bytes) -> None:
        for connection in self._connections:
            try:
                connection.send_bytes(packet)
            except (BrokenPipeError, ConnectionResetError):
                continue  # a dead rank: `_collect` detects and reports it

    def _collect(self, timeout: float) -> _Answers:
        answers = _Answers()
        rank_of = {connection: rank for rank, connection in enumerate(self._connections)}
        deadline = time.monotonic() + timeout
        while rank_of:
            ready = wait(list(rank_of), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = rank_of.pop(connection)
                try:
                    reply = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    # A death is detected after the connection errors that it causes; time 0 reports it first.
                    reply = {"outcome": "died", "time": 0.0, "text": ""}
                answers.replies[rank] = reply
                if reply["outcome"] != "passed":
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        answers.silent = sorted(rank_of.values())
        return answers

    def _stop(self, answers: _Answers, what: str, timeout: float, location: str = "") -> str:
        """Kill the ranks and return a report on each; `location` says where the first failed, if not in the case."""
        stacks = {rank: self._stack(rank) for rank in range(self.world_size)} if answers.silent else {}
        logs = {rank: self._output(rank) for rank in range(self.world_size)}
        statuses = self.close()
        failed = sorted(
            (rank for rank, reply in answers.replies.items() if reply["outcome"] != "passed"),
            key=lambda rank: answers.replies[rank]["time"],
        )
        reports = []
        for rank in failed:
            reply = answers.replies[rank]
            if reply["outcome"] == "died":
                description = f"died with {_status_text(statuses.get(rank))}\n"
            elif reply["outcome"] == "skipped":
                description = f"was skipped ({reply['text']}) while others were not; skip on every rank or on none\n"
            else:
                later = reply["time"] - answers.replies[failed[0]]["time"]
                is_follower = rank != failed[0] and answers.replies[failed[0]]["outcome"] == "failed"
                description = f"failed{f' {later:.3f} s later' if is_follower else location}:\n{reply['text']}"
            reports.append(f"rank {rank} of {self.world_size} {description}{logs[rank]}")
        limit = "when the ranks above had failed" if failed else f"within {timeout:g} s"
        for rank in answers.silent:
            stack = f"{stacks[rank]}{logs[rank]}"
            reports.append(f"rank {rank} of {self.world_size} had not finished {what} {limit}:\n{stack}")
        for rank in [rank for rank in stacks if rank not in answers.silent and rank not in failed]:
            reports.append(f"rank {rank} of {self.world_size} had finished {what}:\n{stacks[rank]}")
        return "\n".join(reports)

    def _stack(self, rank: int) -> str:
        path = Path(self._folder.name, f"stack-{rank}")
        try:
            os.kill(self.pids[rank], STACK_SIGNAL)
        except ProcessLookupError:
            return "(it has ended)\n"
        deadline = time.monotonic() + _STACK_SECONDS
        size = -1
        while time.monotonic() < deadline:  # until the dump exists and has stopped growing
            time.sleep(0.05)
            now = path.stat().st_size if path.exists() else 0
            if now > 0 and now == size:
                break
            size = now
        return (path.read_text(errors="replace") if path.exists() else "") or "(no stack came back)\n"

    def _log(self, rank: int) -> Path:
        return Path(self._folder.name, f"log-{rank}")

    def _output(self, rank: int) -> str:
        if not self._log(rank).exists():
            return ""
        with self._log(rank).open("rb") as log:
            log.seek(self._log_starts[rank])
            text = log.read().decode(errors="replace").strip()
        return f"--- output of rank {rank} ---\n{text}\n" if text else ""


class RankPools:
    """One pool per world size, created at first use; together they have at most MAX_LIVE_RANKS ranks.

    The least recently used pools are closed to make room. The first case of a new rank needs 0.3 CPU seconds more; an
    idle rank needs 0.1 GB of memory and no CPU time.
    """

    MAX_LIVE_RANKS = 18  # pools of 1, 2, 3, 4 and 8 ranks

    def __init__(self) -> None:
        self._server: RankServer | None = None
        self._pools: dict[int, RankPool] = {}  # in order of use

    def get(self, world_size: int) -> RankPool:
        """Return a running pool of `world_size` ranks."""
        if not 1 <= world_size <= MAX_RANKS:
            raise ValueError(f"a pool has 1 to {MAX_RANKS} ranks, not {world_size}; change the world size")
        pool = self._pools.pop(world_size, None)
        if self._server is not None and not self._server.is_alive:
            self.close()
            pool = None
        if pool is None or not pool.is_alive:
            self._pools = {size: other for size, other in self._pools.items() if other.is_alive}
            while self._pools and sum(self._pools) + world_size > self.MAX_LIVE_RANKS:
                self._pools.pop(next(iter(self._pools))).close()
            if self._server is None:
                self._server = RankServer()
            pool = RankPool(self._server, world_size)
        self._pools[world_size] = pool
        return pool

    def close(self) -> None:
        """Kill all ranks and the server. The next `get` starts a new server."""
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()
        if self._server is not None:
            self._server.close()
            self._server = None


def _status_text(status: int | None) -> str:
    if status is None:
        return "an unknown status"
    return signal.Signals(-status).name if status < 0 else f"exit status {status}"


POOLS = RankPools()
atexit.register(POOLS.close)
