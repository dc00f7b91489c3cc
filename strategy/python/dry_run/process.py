"""A process in which dry runs take place, one after another."""

from __future__ import annotations

import dataclasses
import gc
import os
import pickle
from collections.abc import Mapping
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor

from weft.strategy._plan import Cluster
from weft.strategy.comparison import launch, subject
from weft.strategy.comparison.launch import encode_error
from weft.strategy.dry_run.operator_seconds import MeasuredSeconds, OperatorSeconds, RooflineSeconds
from weft.strategy.dry_run.request import Request
from weft.strategy.dry_run.step_clock import StepClock
from weft.strategy.dry_run.temporaries import Temporaries
from weft.strategy.dry_run.training import Prediction, predict


class ProcessEndedError(RuntimeError):
    """The process of the dry runs has ended."""


class DryRunProcess:
    """A new process of this host; what it measures about operators serves all its dry runs. A context manager.

    Modules and batches are sent once. A script must use it under `if __name__ == "__main__"`.
    """

    def __enter__(self) -> DryRunProcess:
        context: Any = mp.get_context(launch.START_METHOD)
        self._connection, far_end = context.Pipe()
        self._process = context.Process(target=_serve, args=(far_end,))  # not a daemon: loaders may have workers
        self._process.start()
        far_end.close()
        self._sent: list[Any] = []
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._connection.close()
        if kind is not None:
            self._process.terminate()
        self._process.join()

    def run(self, request: Request, cluster: Cluster | None = None) -> list[Prediction]:
        """Return the predictions for the request's ranks; with a cluster, also the times of a step.

        Raises:
            ValueError: the request is invalid for the model, or cannot be pickled.
            RuntimeError: the module raised an error.
            ProcessEndedError: the process ended.
        """
        try:
            positions = tuple(self._send(each) for each in (request.module, request.batch))
            self._connection.send((dataclasses.replace(request, module=None, batch=None), positions, cluster))
            kind, content = self._connection.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            self._process.join()
            raise ProcessEndedError(
                f"estimate: the process of the dry run ended with exit status {self._process.exitcode}; check that a "
                'script starts it under `if __name__ == "__main__"`, and that the host has enough memory.'
            ) from None
        except _NotSendableError:
            raise
        except (AttributeError, TypeError, ValueError, pickle.PicklingError) as error:
            raise _NotSendableError(error) from error
        if kind == "invalid":
            raise ValueError(content.replace("compare: ", "estimate: ", 1))  # an error of `comparison.subject`
        if kind == "failed":
            raise RuntimeError(f"estimate: {content}")
        predictions: list[Prediction] = content
        return predictions

    def _send(self, value: Any) -> int:
        """Send a value, unless it is the same object as an earlier one; return its position among those sent."""
        for position, sent in enumerate(self._sent):
            if sent is value:
                return position
        try:
            payload = pickle.dumps(value)
        except Exception as error:  # __reduce__ of a user's object may raise anything
            raise _NotSendableError(error) from error
        self._connection.send(payload)
        self._sent.append(value)
        return len(self._sent) - 1


class _NotSendableError(ValueError):
    def __init__(self, error: Exception) -> None:
        super().__init__(
            f"estimate: the arguments cannot be sent to a new process ({error}); pass a module that no run has set up, "
            "and a batch and loss_fn that can be pickled: functions at the top level of a file, or the "
            "'package.module:name' of one."
        )


class _MadeOnce:
    """A function that makes a batch, called once for all dry runs."""

    def __init__(self, make: Any) -> None:
        self._make = make
        self._made: list[Any] = []

    def __call__(self) -> Any:
        if not self._made:
            self._made.append(self._make())
        return self._made[0]


class _Server:
    """The other side of a DryRunProcess."""

    def __init__(self) -> None:
        self._objects: list[bytes] = []
        self._batches: dict[int, Any] = {}
        self._temporaries = Temporaries()
        self._operators: dict[str, OperatorSeconds] = {}

    def add(self, payload: bytes) -> None:
        self._objects.append(payload)

    def answer(self, request: Request, positions: tuple[int, int], cluster: Cluster | None) -> list[Prediction]:
        request = dataclasses.replace(
            request, module=pickle.loads(self._objects[positions[0]]), batch=self._batch(positions[1])
        )
        clock = None
        if cluster is not None:
            is_measured = cluster.name == "cpu"
            if is_measured:
                torch.set_num_threads(1)
            operators = self._operators.get(cluster.name)
            if operators is None:
                operators = (MeasuredSeconds if is_measured else RooflineSeconds)(cluster)
                self._operators[cluster.name] = operators
            clock = StepClock(
                cluster,
                operators,
                request.num_ranks,
                request.sizes.tensor_parallel,
                has_sharded_parameters=request.shards_parameters,
            )
        return [predict(request, rank, self._temporaries, clock) for rank in request.ranks]

    def _batch(self, position: int) -> Any:
        if position not in self._batches:
            batch = subject.resolve(pickle.loads(self._objects[position]))
            is_made = callable(batch) and not isinstance(batch, (Tensor, Mapping))
            self._batches[position] = _MadeOnce(batch) if is_made else batch
        return self._batches[position]


def _serve(connection: Connection) -> None:
    os.dup2(2, 1)  # the parent's stdout is for the result
    gc.freeze()  # each dry run collects garbage twice: what is imported by now is none
    server = _Server()
    while True:
        try:
            message = connection.recv()
        except EOFError:
            gc.unfreeze()  # some extension modules report what is not collected at exit
            return
        if isinstance(message, bytes):
            server.add(message)
            continue
        try:
            answer: tuple[str, Any] = "done", server.answer(*message)
        except Exception as error:  # sent to the parent, which raises it
            answer = encode_error(0, error)
        connection.send(answer)
