"""Links, over which messages of `weft.ops.pipeline_send` and `pipeline_recv` go directly between devices.

Without a link the tensors of a message are copied through host memory on both ranks. A link consists of two backends
between two ranks of a group, one per direction (NCCL on CUDA). A send and its receive wait for each other on the
device; the host does not wait. Each message is announced over the group's backend for CPU tensors. An announcement
contains the shapes and dtypes of the message's tensors only if no earlier announcement of the link contained them.

A send is in flight until the peer waits for this message or for a later one. While a send is in flight, a device
synchronisation on both ranks (`torch.cuda.synchronize`, an allocator that must free memory first,
CUDA_LAUNCH_BLOCKING=1, a kernel that is loaded at its first launch without CUDA_MODULE_LOADING=EAGER) deadlocks until
NCCL's watchdog ends the process.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend
from torch.distributed.distributed_c10d import _get_process_group_store

from weft import _collectives

__all__ = ["link", "unlink"]

Transport = Callable[[dist.Store, int, int, timedelta], Backend]

# How often each peer of a group was linked. Each link needs new store keys: old backends leave keys in the store.
_num_links: WeakKeyDictionary[dist.ProcessGroup, Counter[int]] = WeakKeyDictionary()


def link(
    group: dist.ProcessGroup,
    peers: Iterable[int],
    device: torch.device,
    *,
    transport: Transport | None = None,
    timeout: timedelta = timedelta(minutes=10),
) -> None:
    """Link this rank to peers: messages between them whose tensors are all on `device` go directly between devices.

    Both ranks of a pair call `link` before their first message, each with its peer in `peers` and with the device of
    its own tensors; a call blocks until both ranks have called. Messages with tensors on other devices still go through
    host memory. Peers stay linked until `unlink`. If groups have ranks in common, all ranks must link these groups in
    the same order.

    Args:
        group: a group with a backend for CPU tensors, such as "cpu:weft,cuda:nccl".
        peers: ranks of the group.
        device: a device with an index, such as "cuda:0", or the CPU.
        transport: a function that makes the backend of one direction between the two ranks; called as
            `transport(store, rank, 2, timeout)`. Default: NCCL, for CUDA devices.
        timeout: limit for a send, from its call to its completion; announcements use the group's timeout.

    Raises:
        ValueError: the group has no backend for CPU tensors; a peer is this rank or not in the group; a device other
            than the CPU has no index; `transport` is None and the device is not a CUDA device; a peer is linked already
            for another device.
    """
    own_rank, sorted_peers = group.rank(), sorted(set(peers))
    if device.type != "cpu" and device.index is None:
        raise ValueError(f"weft: link got the device {device} without an index; pass an index, as in '{device}:0'.")
    if transport is None and device.type != "cuda":
        raise ValueError(f"weft: link got the device {device} without a transport; pass transport=, or a CUDA device.")
    linked = {peer: _collectives.pipeline_link_device(group, peer) for peer in sorted_peers}
    for peer, linked_device in linked.items():
        if linked_device not in (None, device):
            raise ValueError(
                f"weft: rank {own_rank} is linked to rank {peer} for {linked_device} and got {device}; "
                "unlink the group first."
            )
    # Linking blocks until both ranks of a pair call. All ranks link pairs in one order, so that no waits form a cycle.
    for peer in sorted(sorted_peers, key=lambda peer: (min(own_rank, peer), max(own_rank, peer))):
        if linked[peer] is None:
            _link(group, peer, device, transport, timeout)


def _link(
    group: dist.ProcessGroup, peer: int, device: torch.device, transport: Transport | None, timeout: timedelta
) -> None:
    num_links = _num_links.setdefault(group, Counter())
    low, high = sorted((group.rank(), peer))

    def make(rank: int, towards: int) -> Backend:
        num_links[peer] += int(towards == 0)  # once per link, also if the link fails: it leaves keys in the store
        name = f"weft link {num_links[peer]} {group.group_name}/{low}-{high}/{towards}"
        store = dist.PrefixStore(name, _get_process_group_store(group))
        ranks = [dist.get_global_rank(group, each) for each in (low, high)]
        return (transport or functools.partial(_nccl, name, ranks))(store, rank, 2, timeout)

    _collectives.link_pipeline(group, peer, device, make)


def _nccl(name: str, ranks: list[int], store: dist.Store, rank: int, size: int, timeout: timedelta) -> Backend:
    options: Any = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.group_name, options.global_ranks_in_group = name, ranks
    options.is_high_priority_stream = True
    return dist.ProcessGroupNCCL(store, rank, size, options)


def unlink(group: dist.ProcessGroup) -> None:
    """End all links of this rank in the group; does nothing if there are none.

    This rank and its linked peers must all call `unlink`, after they have waited for the last message and before the
    group is destroyed: ending an NCCL backend waits for operations in flight.
    """
    _collectives.unlink_pipeline(group)
