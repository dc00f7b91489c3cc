"""The c10d backend `weft`: collectives of CPU tensors, through shared memory between the processes of a host.

`import weft` registers the backend. Select it by `dist.init_process_group("cpu:weft")`, by `"cpu:weft,cuda:nccl"`, or
by `dist.new_group(backend="cpu:weft")`. Code that uses `torch.distributed` runs on this backend unchanged.
Between hosts the backend sends over gloo, or over the backend that `BackendOptions.transport` makes.

A failed group raises the same `CollectiveError` on every rank, and stays failed: destroy it and create a new group.
Invalid arguments raise the errors that gloo raises, and the group remains usable.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Backend

from weft import _collectives

__all__ = [
    "BackendOptions",
    "CollectiveError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "GroupAbortedError",
    "PeerLostError",
    "SlowNetwork",
    "seconds_waited",
]


class CollectiveError(dist.DistBackendError):
    """A group of the weft backend has failed."""


class CollectiveMismatchError(CollectiveError):
    """The ranks of a group made calls that do not match, or passed different options when they created it."""


class PeerLostError(CollectiveError):
    """A rank that another rank waits for has left the group, or its process has ended."""


class CollectiveTimeoutError(CollectiveError):
    """A rank did not arrive within the timeout of the group or of the call."""


class GroupAbortedError(CollectiveError):
    """A rank has aborted the group or used it after destroying it, or an operation has failed on a rank.

    Also raised if a rank destroys the group before an operation is done, or if a rank cannot create the group because
    it cannot open the shared memory, read the store or create the transport.
    """


def seconds_waited() -> float:
    """Return the seconds that this thread has spent in `wait` of works of this backend, since it started.

    Operators of weft, functional collectives and synchronous calls wait, too. The seconds include those in which the
    thread moved and reduced data. Waits through futures do not count, such as those of DistributedDataParallel.
    """
    return _collectives.seconds_waited()


def _gloo(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Backend:
    return dist.ProcessGroupGloo(store, rank, size, timeout)


@dataclass(frozen=True)
class SlowNetwork:
    """A network that CPU ranks of one host only pretend to have: a tool for tests and benchmarks.

    A call between pretended hosts completes later, by the time that a ring would take: each rank sends (n - 1) / n of
    the bytes in n - 1 messages, and twice that for an all-reduce; a message between stages takes one. Calls that run at
    the same time do not slow each other. Groups without `BackendOptions.slow_network` have the network that
    WEFT_SLOW_NETWORK describes, "ranks_per_host=2,seconds_per_message=1e-3,bytes_per_second=1e8", if it is set.

    Attributes:
        ranks_per_host: as many consecutive global ranks count as one host.
        seconds_per_message: the latency of a message.
        bytes_per_second: that a rank sends.
    """

    ranks_per_host: int
    seconds_per_message: float
    bytes_per_second: float

    def __post_init__(self) -> None:
        """Raise ValueError for numbers that no network has."""
        if self.ranks_per_host < 1 or self.seconds_per_message < 0 or self.bytes_per_second <= 0:
            raise ValueError(f"got {self}; pass at least 1 rank, a latency from 0 and a rate above 0.")

    @classmethod
    def of_environment(cls) -> SlowNetwork | None:
        """Return the network of WEFT_SLOW_NETWORK; None: it is not set. Raises ValueError for another text."""
        text = os.environ.get("WEFT_SLOW_NETWORK")
        if not text:
            return None
        try:
            values = dict(part.split("=") for part in text.split(","))
            ranks = int(values.pop("ranks_per_host"))
            return cls(ranks, **{name: float(value) for name, value in values.items()})
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"WEFT_SLOW_NETWORK is {text!r} ({error}); set it as in 'ranks_per_host=2,seconds_per_message=1e-3,"
                "bytes_per_second=1e8'."
            ) from None


@dataclass(frozen=True)
class BackendOptions:
    """The options of this backend: the `pg_options` of `init_process_group` and `new_group`.

    Attributes:
        staging_limit_bytes: the limit, in bytes per host, for the staging buffers and message rings of all ranks of
            the group together; exceeded only if their minimum sizes need more. Must be equal on all ranks of a host.
        transport: a function that creates a backend over the ranks of the group; the `send` and `recv` of this backend
            transfer bytes between hosts. Called as `transport(store, rank, size, timeout)` on every rank of a
            multi-host group, and not called on a single host. Default: gloo.
        slow_network: see SlowNetwork.
    """

    staging_limit_bytes: int = 16 * 1024 * 1024
    transport: Callable[[dist.Store, int, int, timedelta], Backend] = _gloo
    slow_network: SlowNetwork | None = None

    def __post_init__(self) -> None:
        """Raise for options with which no group could be created."""
        limit = self.staging_limit_bytes
        if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
            raise ValueError(f"BackendOptions got staging_limit_bytes={limit!r}; pass a number of bytes above 0.")
        if not callable(self.transport):
            raise TypeError(
                f"BackendOptions got transport={self.transport!r}; pass a function (store, rank, size, timeout) that "
                "creates a backend."
            )


def _create(group: dist.distributed_c10d._DistributedBackendOptions, pg_options: object | None) -> Backend:
    # If a caller passes no options, torch passes its default options, or those of another group.
    if pg_options is not None and not isinstance(pg_options, (BackendOptions, Backend.Options)):
        raise TypeError(f"got {pg_options=!r} for the backend weft; pass weft.collectives.BackendOptions(...).")
    options = pg_options if isinstance(pg_options, BackendOptions) else BackendOptions()
    network = options.slow_network or SlowNetwork.of_environment()
    rates = None if network is None else (network.ranks_per_host, network.seconds_per_message, network.bytes_per_second)
    return _collectives.make_backend(
        group.store,
        group.group_rank,
        group.group_size,
        group.timeout,
        group.group_id,
        group.global_ranks_in_group,
        options.staging_limit_bytes,
        options.transport,
        rates,
    )


def register() -> None:
    """Register the backend with torch.distributed; call it once per process."""
    _collectives.set_error_classes(CollectiveMismatchError, PeerLostError, CollectiveTimeoutError, GroupAbortedError)
    dist.Backend.register_backend("weft", _create, extended_api=True, devices=["cpu"])
    # A process that exits with live groups notifies its peers, which then need not detect the exit.
    atexit.register(_collectives.leave_all_groups)
