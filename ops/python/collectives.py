"""The c10d backend `weft`: collectives of CPU tensors, through shared memory between the processes of a host.

`import weft` registers it: `dist.init_process_group("cpu:weft")`, `"cpu:weft,cuda:nccl"`,
`dist.new_group(backend="cpu:weft")`. Everything that talks to `torch.distributed` runs on it unchanged.
Between hosts it sends over gloo, or over the backend that `BackendOptions.transport` makes.

A failure is the same on every rank of a group, has one of the classes here, and stays: a failed group is
destroyed and made anew.
"""

from __future__ import annotations

import atexit
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
]


class CollectiveError(dist.DistBackendError):
    """A group of the weft backend has failed."""


class CollectiveMismatchError(CollectiveError):
    """The ranks of a group made calls that do not belong together."""


class PeerLostError(CollectiveError):
    """The process of a rank that is waited for has ended, or has left the group."""


class CollectiveTimeoutError(CollectiveError):
    """A rank did not come within the timeout of the group or the call."""


class GroupAbortedError(CollectiveError):
    """A rank has aborted the group, or this rank has left it."""


def _gloo(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.distributed_c10d.Backend:
    return dist.ProcessGroupGloo(store, rank, size, timeout)


@dataclass(frozen=True)
class BackendOptions:
    """What `pg_options` of `init_process_group` and `new_group` may be for this backend.

    Attributes:
        staging_limit_bytes: of shared memory that a group takes on a host at most, all its ranks together; a page
            for each of its buffers is the least. The same on all ranks of a host.
        transport: makes the backend whose `send` and `recv` carry bytes between hosts, over the ranks of the
            group. Called as `transport(store, rank, size, timeout)` on every rank, and only where they run on
            several hosts.
    """

    staging_limit_bytes: int = 16 * 1024 * 1024
    transport: Callable[[dist.Store, int, int, timedelta], dist.distributed_c10d.Backend] = _gloo

    def __post_init__(self) -> None:
        """Refuse what no group could be made with."""
        limit = self.staging_limit_bytes
        if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
            raise ValueError(f"BackendOptions got staging_limit_bytes={limit!r}; pass a number of bytes above 0.")
        if not callable(self.transport):
            raise TypeError(
                f"BackendOptions got transport={self.transport!r}; pass a function (store, rank, size, timeout) that "
                "makes a backend."
            )


def _create(opts: dist.distributed_c10d._DistributedBackendOptions, options: object | None) -> object:
    # torch hands its own options, or those of another group, to backends that are made without any.
    if options is not None and not isinstance(options, (BackendOptions, Backend.Options)):
        raise TypeError(f"got pg_options={options!r} for the backend weft; pass weft.collectives.BackendOptions(...).")
    mine = options if isinstance(options, BackendOptions) else BackendOptions()
    return _collectives.make_backend(
        opts.store,
        opts.group_rank,
        opts.group_size,
        opts.timeout,
        opts.group_id,
        opts.global_ranks_in_group,
        mine.staging_limit_bytes,
        mine.transport,
    )


def register() -> None:
    """Make the backend known to torch.distributed; once per process."""
    _collectives.set_error_classes(CollectiveMismatchError, PeerLostError, CollectiveTimeoutError, GroupAbortedError)
    dist.Backend.register_backend("weft", _create, extended_api=True, devices=["cpu"])
    # A process that ends with its groups tells the peers so; they need not find out.
    atexit.register(_collectives.leave_all_groups)
