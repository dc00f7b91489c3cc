"""Messages of `weft.ops.pipeline_send` and `pipeline_recv` from device to device.

Without a link the tensors of a message stop in host memory on both sides. A link is two backends between two ranks of
a group, one for each direction, NCCL's on CUDA: its sends and receives wait for each other on the device alone. What
comes next is announced over the group's backend for CPU tensors, shapes and dtypes only where they are new.

A send ends when the peer has asked for it, in one of its waits. What waits for a whole device before that on both ranks
(`torch.cuda.synchronize`, memory that the allocator has to give back first, CUDA_LAUNCH_BLOCKING=1) deadlocks, or
until NCCL's watchdog ends the process.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Backend, _get_process_group_store

from weft import _collectives

__all__ = ["link", "unlink"]

Transport = Callable[[dist.Store, int, int, timedelta], Backend]

# How often each peer was linked: a store keeps what its backends have left in it.
_times: WeakKeyDictionary[dist.ProcessGroup, Counter[int]] = WeakKeyDictionary()


def link(
    group: dist.ProcessGroup,
    peers: Iterable[int],
    device: torch.device,
    *,
    transport: Transport | None = None,
    timeout: timedelta = timedelta(minutes=10),
) -> None:
    """Let messages with these peers travel from device to device, of which all tensors are on `device`.

    Both ranks of a pair call it, each with the other among its peers and a device of its own, before they exchange
    messages: it blocks until both have. Others go as before, through host memory. Peers that are linked stay so.
    Groups that have ranks in common are linked in one order on all of them.

    Args:
        group: with a backend for CPU tensors, such as "cpu:weft,cuda:nccl".
        peers: ranks, counted in the group.
        device: with its number, as tensors on it say: "cuda:0".
        transport: makes a backend over two ranks for each direction; called as `transport(store, rank, 2, timeout)`.
            Default: NCCL's.
        timeout: of the backends, for a send from its call to its end; an announcement has that of the group.

    Raises:
        ValueError: a group without a backend for CPU tensors, what is no other rank of it, a device without a number,
            NCCL for other tensors than CUDA's, or another device than a peer is linked for.
    """
    own, wanted = group.rank(), sorted(set(peers))
    if device.type != "cpu" and device.index is None:
        raise ValueError(f"weft: got the device {device} to link ranks for; pass one with its number: '{device}:0'.")
    if transport is None and device.type != "cuda":
        raise ValueError(f"weft: got the device {device} to link ranks for by NCCL; pass transport=, or a CUDA device.")
    linked = {peer: _collectives.pipeline_link_device(group, peer) for peer in wanted}
    for peer, other in linked.items():
        if other not in (None, device):
            raise ValueError(
                f"weft: rank {own} is linked to rank {peer} for {other} and got {device}; unlink the group first."
            )
    # Each pair waits for its two ranks: in one order on all of them, none waits for another in a circle.
    for peer in sorted(wanted, key=lambda peer: (min(own, peer), max(own, peer))):
        if linked[peer] is None:
            _link(group, peer, device, transport, timeout)


def _link(
    group: dist.ProcessGroup, peer: int, device: torch.device, transport: Transport | None, timeout: timedelta
) -> None:
    times = _times.setdefault(group, Counter())
    low, high = sorted((group.rank(), peer))

    def make(rank: int, towards: int) -> Backend:
        times[peer] += int(towards == 0)  # the first of the two; one that fails leaves something in the store, too
        name = f"weft link {times[peer]} {group.group_name}/{low}-{high}/{towards}"
        store = dist.PrefixStore(name, _get_process_group_store(group))
        ranks = [dist.get_global_rank(group, each) for each in (low, high)]
        return (transport or functools.partial(_nccl, name, ranks))(store, rank, 2, timeout)

    _collectives.link_pipeline(group, peer, device, make)


def _nccl(name: str, ranks: list[int], store: dist.Store, rank: int, size: int, timeout: timedelta) -> Backend:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.group_name, options.global_ranks_in_group = name, ranks
    options.is_high_priority_stream = True
    return dist.ProcessGroupNCCL(store, rank, size, options)


def unlink(group: dist.ProcessGroup) -> None:
    """End all links of this rank in the group, after the last message was waited for and before the group is destroyed.

    The peers call it, too: NCCL waits for what is under way. Nothing happens where there are no links.
    """
    _collectives.unlink_pipeline(group)
