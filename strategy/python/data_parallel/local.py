"""Converts DTensors to this rank's shards, and full tensors to DTensors, without communication."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement

from weft.strategy._plan import shard_range


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, or all of a plain tensor: detached from autograd, without a copy."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


def distributed(
    local: Tensor,
    like: DTensor,
    shape: torch.Size,
    stride: tuple[int, ...],
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """Return a DTensor of this rank's shard, sharded like another one; the shard may be in CPU memory on a CUDA mesh.

    Args:
        shape, stride: of the full tensor.
        placements: None: those of `like`.
    """
    mesh, placements = like.device_mesh, tuple(placements or like.placements)
    if local.device.type == mesh.device_type:
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
    # from_local would move the shard to the mesh's device.
    spec = DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, stride, local.dtype))
    return DTensor(local, spec, requires_grad=False)


def local_gradient(parameter: Tensor, redistributes: bool = False) -> Tensor:
    """Return this rank's gradient of its shard; collective if the gradient is a partial sum.

    It has the parameter's dtype or float32.

    Args:
        redistributes: also accept a gradient that is sharded in another way than the parameter; collective then.

    Raises:
        RuntimeError: the gradient is sharded in another way than the parameter.
    """
    gradient = parameter.grad
    assert gradient is not None
    if isinstance(gradient, DTensor):
        wanted = parameter.placements if isinstance(parameter, DTensor) else None
        if wanted is not None and (redistributes or any(p.is_partial() for p in gradient.placements)):
            gradient = gradient.redistribute(placements=wanted)
        if gradient.placements != wanted:
            raise RuntimeError(
                f"the optimizer got a parameter with the placements {wanted} and its gradient with "
                f"{gradient.placements}; give them the same ones."
            )
    local = local_shard(gradient)
    return local if local.dtype in (torch.float32, parameter.dtype) else local.float()


def shard_like(full: Tensor, like: DTensor, device: torch.device | None = None) -> DTensor:
    """Return a full value, equal on all ranks, as a DTensor sharded like `like`; copies this rank's shard.

    `device`: of the shard; None: that of `like`.
    """
    shard = full
    for axis in sharding_order(like.placements):
        placement: Any = like.placements[axis]
        if not placement.is_replicate():
            mesh, dim = like.device_mesh, placement.dim
            shard = shard.narrow(dim, *shard_range(shard.shape[dim], mesh.size(axis), mesh.get_local_rank(axis)))
    local = torch.empty_like(like._local_tensor, dtype=full.dtype, device=device).copy_(shard)
    return distributed(local, like, like.shape, like.stride())


def sharding_order(placements: tuple[Placement, ...]) -> list[int]:
    """Return the mesh's axes in the order in which they shard a tensor.

    The order is outer to inner; but an axis over which FSDP2 shards existing shards (`_StridedShard`) comes last.
    """
    is_strided = [type(placement).__name__ == "_StridedShard" for placement in placements]
    return sorted(range(len(placements)), key=lambda axis: (is_strided[axis], axis))
