"""Sets of processes, each with a separate default group, like separate jobs; while one set works, the others wait."""

from __future__ import annotations

import datetime
import tempfile
import time
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT_SECONDS = 300.0


class ProcessSet:
    """`num_ranks` fresh processes of one default group, with one thread each, in which a function answers messages.

    Args:
        function: each rank calls `function(connection, *args)`, which answers each message that it receives.
        num_ranks: the number of processes to start; their rendezvous is a file.
        backend: the default group's backend.
        args: further arguments of the function.
    """

    def __init__(self, function: Callable[..., None], num_ranks: int, backend: str, *args: Any) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="weft-benchmark-")
        pairs = [Pipe() for _ in range(num_ranks)]
        self._connections = [parent_end for parent_end, _ in pairs]
        self._ranks = mp.start_processes(
            _rank_main,
            ([rank_end for _, rank_end in pairs], Path(self._folder.name, "store"), backend, function, args),
            num_ranks,
            join=False,
            start_method="fork",  # ranks inherit the imported torch; this process has started nothing else
        )

    def request(self, message: Any) -> list[Any]:
        """Send a message to every rank, and return one answer from each, by rank.

        Raises:
            torch.multiprocessing.ProcessRaisedException: a rank raised; its traceback is in the text.
            torch.multiprocessing.ProcessExitedException: a rank ended without an exception, such as by a signal.
            TimeoutError: the answers took more than TIMEOUT_SECONDS.
        """
        for connection in self._connections:
            connection.send(message)
        deadline = time.monotonic() + TIMEOUT_SECONDS
        return [self._answer(connection, deadline) for connection in self._connections]

    def _answer(self, connection: Connection, deadline: float) -> Any:
        while not connection.poll(1.0):
            self._ranks.join(timeout=0)
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"a rank gave no answer for {TIMEOUT_SECONDS:.0f} s; run the benchmark on a quieter machine."
                )
        return connection.recv()

    def close(self) -> None:
        """Kill the processes."""
        for process in self._ranks.processes:
            process.kill()
            process.join()
        self._folder.cleanup()


def _rank_main(
    rank: int,
    connections: list[Connection],
    store: Path,
    backend: str,
    function: Callable[..., None],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        backend,
        store=dist.FileStore(str(store), len(connections)),
        rank=rank,
        world_size=len(connections),
        timeout=datetime.timedelta(seconds=2 * TIMEOUT_SECONDS),
    )
    function(connections[rank], *args)
