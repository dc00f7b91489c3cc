"""Every collective of torch.distributed as a function of a group, which may be of any backend.

Each takes (group, rank, world_size, make), where make(key, *shape) returns this rank's input, and returns the
resulting tensors.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

Make = Callable[..., Tensor]
Call = Callable[[dist.ProcessGroup, int, int, Make], list[Tensor]]

REDUCE_OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")


def all_reduce(op: str) -> Call:
    def call(group: dist.ProcessGroup, rank: int, world_size: int, make: Make) -> list[Tensor]:
        tensor = make("x", 3, 5)
        dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op), group=group)
        return [tensor]

    return call


def reduce(op: str) -> Call:
    def call(group: dist.ProcessGroup, rank: int, world_size: int, make: Make) -> list[Tensor]:
        tensor = make("x", 7)
        root = world_size - 1
        dist.reduce(tensor, root, op=getattr(dist.ReduceOp, op), group=group)
        return [tensor] if rank == root else []  # the values elsewhere are undefined

    return call


def reduce_scatter(op: str) -> Call:
    def call(group: dist.ProcessGroup, rank: int, world_size: int, make: Make) -> list[Tensor]:
        output = torch.zeros_like(make("out", 2, 3))
        full = make("x", 2 * world_size, 3)
        dist.reduce_scatter_tensor(output, full, op=getattr(dist.ReduceOp, op), group=group)
        return [output]

    return call


def broadcast(group: dist.ProcessGroup, rank: int, world_size: int, make: Make) -> list[Tensor]:
    tensors = []
    for root in range(world_size):
        tensor = make(root, 4, 3)
        dist.broadcast(tensor, root, group=group)
        tensors.append(tensor)
    return tensors


def all_gather(group: dist.ProcessGroup, rank: int, world_size: int, make: Make) -> list[Tensor]:
    outputs = [torch.zeros_like(make("out", 2, 3)) for _ in range(world_size)]
    dist.all_gather(outputs, make("x", 2, 3), group=group)
    return outputs


def all_gather_into_tensor(group: dist.ProcessGroup, rank: int, world_size: int, make: Make) -> list[Tensor]:
    output = torch.zeros_like(make("out", 2 * world_size, 3))
    dist.all_gather_into_tensor(output, make("x", 2, 3), group=group)
    return [output]


def gather(group: dist.ProcessGroup, rank: int, world_size: int, make: Make) -> list[Tensor]:
    outputs = [torch.zeros_like(make("out", 5)) for _ in range(world_size)] if rank == 0 else None
    dist.gather(make("x", 5), outputs, dst=0, group=group)
    return outputs or []


def scatter(group: dist.ProcessGroup, rank: int, world_size: int, make: Make) -> list[Tensor]:
    root = world_size - 1
    output = torch.zeros_like(make("out", 5))
    inputs = [make(each, 5) for each in range(world_size)] if rank == root else None
    dist.scatter(output, inputs, src=root, group=group)
    return [output]


def all_to_all_single(group: dist.ProcessGroup, rank: int, world_size: int, make: Make) -> list[Tensor]:
    """Rank a sends a + 2 b rows to rank b."""
    send_splits = [rank + 2 * peer for peer in range(world_size)]
    recv_splits = [peer + 2 * rank for peer in range(world_size)]
    output = torch.zeros_like(make("out", sum(recv_splits), 2))
    dist.all_to_all_single(output, make("x", sum(send_splits), 2), recv_splits, send_splits, group=group)
    even = torch.zeros_like(make("even_out", world_size * 3))
    dist.all_to_all_single(even, make("even", world_size * 3), group=group)
    return [output, even]


def send_recv(group: dist.ProcessGroup, rank: int, world_size: int, make: Make) -> list[Tensor]:
    """Send two messages around a ring, with tags that are received in the opposite order."""
    received = [torch.zeros_like(make("out", 4)) for _ in range(2)]
    if world_size == 1:
        return []
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    sent = [make(tag, 4) for tag in range(2)]
    works = [dist.isend(sent[tag], after, group=group, tag=tag) for tag in (0, 1)]
    works += [dist.irecv(received[tag], before, group=group, tag=tag) for tag in (1, 0)]
    for work in works:
        work.wait()
    return received


DATA_MOVEMENTS: dict[str, Call] = {
    "broadcast": broadcast,
    "all_gather": all_gather,
    "all_gather_into_tensor": all_gather_into_tensor,
    "gather": gather,
    "scatter": scatter,
    "all_to_all_single": all_to_all_single,
    "send_recv": send_recv,
}
REDUCTIONS: dict[str, Callable[[str], Call]] = {
    "all_reduce": all_reduce,
    "reduce": reduce,
    "reduce_scatter": reduce_scatter,
}
