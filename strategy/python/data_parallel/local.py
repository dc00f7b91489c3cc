"""The local shard of a tensor."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from weft.strategy._plan import shard_range


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's storage of a tensor, outside of autograd; a plain tensor is entirely local."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


def placed_like(whole: Tensor, like: DTensor) -> DTensor:
    """Return this rank's shard of a full value, sharded like `like`; a copy, without communication."""
    part = whole
    for axis in _in_order_of_cuts(like.placements):
        placement = like.placements[axis]
        if not placement.is_replicate():
            mesh, dim = like.device_mesh, placement.dim
            part = part.narrow(dim, *shard_range(part.shape[dim], mesh.size(axis), mesh.get_local_rank(axis)))
    local = torch.empty_like(like._local_tensor, dtype=whole.dtype).copy_(part)
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _in_order_of_cuts(placements: tuple[Placement, ...]) -> list[int]:
    """Return the mesh's axes in the order of sharding: outer to inner, but FSDP2 shards the shards of inner axes."""
    is_strided = [type(placement).__name__ == "_StridedShard" for placement in placements]
    return sorted(range(len(placements)), key=lambda axis: (is_strided[axis], axis))
