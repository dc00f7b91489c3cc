"""Converts DTensors to this rank's shards, and full tensors to DTensors, without communication."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from weft.strategy._plan import shard_range


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, or all of a plain tensor: detached from autograd, without a copy."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


def shard_like(full: Tensor, like: DTensor) -> DTensor:
    """Return a full value, equal on all ranks, as a DTensor sharded like `like`; copies this rank's shard."""
    shard = full
    for axis in sharding_order(like.placements):
        placement: Any = like.placements[axis]
        if not placement.is_replicate():
            mesh, dim = like.device_mesh, placement.dim
            shard = shard.narrow(dim, *shard_range(shard.shape[dim], mesh.size(axis), mesh.get_local_rank(axis)))
    local = torch.empty_like(like._local_tensor, dtype=full.dtype).copy_(shard)
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def sharding_order(placements: tuple[Placement, ...]) -> list[int]:
    """Return the mesh's axes in the order in which they shard a tensor.

    The order is outer to inner; but an axis over which FSDP2 shards existing shards (`_StridedShard`) comes last.
    """
    is_strided = [type(placement).__name__ == "_StridedShard" for placement in placements]
    return sorted(range(len(placements)), key=lambda axis: (is_strided[axis], axis))
