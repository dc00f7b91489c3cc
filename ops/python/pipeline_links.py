"""Messages of `weft.ops.pipeline_send` and `pipeline_recv` from device to device.

Without a link the tensors of a message stop in host memory on both sides. A link is two backends between two ranks of
a group, one for each direction, NCCL's on CUDA: its sends and receives wait for each other on the device alone. What
comes next is announced over the group's backend for CPU tensors, shapes and dtypes only where they are new.
"""

from __future__ import annotations

import atexit
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Backend, _get_process_group_store

from weft import _collectives

__all__ = ["link", "unlink"]

Transport = Callable[[dist.Store, int, int, timedelta], Backend]

# By the group's name: the backends to each peer that is linked.
_backends: dict[str, dict[int, list[Backend]]] = {}
_times_linked: Counter[tuple[str, int]] = Counter()


def _nccl(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Backend:
    return dist.ProcessGroupNCCL(store, rank, size, timeout)


def link(
    group: dist.ProcessGroup,
    peers: Iterable[int],
    device: torch.device,
    *,
    transport: Transport = _nccl,
    timeout: timedelta = timedelta(minutes=10),
) -> None:
    """Let messages with these peers travel from device to device, of which all tensors are on `device`.

    Both ranks of a pair call it, each with the other among its peers and a device of its own, before they exchange
    messages: it blocks until both have. Others go as before, through host memory. Peers that are linked stay so.

    Args:
        group: with a backend for CPU tensors, such as "cpu:weft,cuda:nccl".
        peers: ranks, counted in the group.
        device: with its number, as tensors on it say: "cuda:0".
        transport: makes a backend over two ranks for each direction; called as `transport(store, rank, 2, timeout)`.
        timeout: of the backends; an announcement has that of the group.

    Raises:
        ValueError: a group without a backend for CPU tensors, or what is no other rank of it.
    """
    own, linked = group.rank(), _backends.setdefault(group.group_name, {})
    # Each pair waits for its two ranks: in one order on all of them, none waits for another in a circle.
    for peer in sorted(set(peers) - set(linked), key=lambda peer: (min(own, peer), max(own, peer))):
        linked[peer] = _linked(group, peer, device, transport, timeout)


def _linked(
    group: dist.ProcessGroup, peer: int, device: torch.device, transport: Transport, timeout: timedelta
) -> list[Backend]:
    backends: list[Backend] = []
    number = _times_linked[group.group_name, peer]
    _times_linked[group.group_name, peer] += 1

    def make(rank: int, towards: int) -> Backend:
        pair = f"{min(group.rank(), peer)}-{max(group.rank(), peer)}"
        store = dist.PrefixStore(f"weft/link {number}/{pair}/{towards}", _get_process_group_store(group))
        backends.append(transport(store, rank, 2, timeout))
        return backends[-1]

    _collectives.link_pipeline(group, peer, device, make)
    return backends


def unlink(group: dist.ProcessGroup) -> None:
    """End all links of this rank in the group, after the last message has come; before the group is destroyed."""
    _collectives.unlink_pipeline(group)
    for backends in _backends.pop(group.group_name, {}).values():
        for backend in backends:
            backend.shutdown()


@atexit.register
def _abort_all() -> None:
    for linked in _backends.values():
        for backends in linked.values():
            for backend in backends:
                backend.abort()
