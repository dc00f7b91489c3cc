"""Shards the parameters of experts over the axis expert_parallel, without communication."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from weft.strategy._plan import shard_range
from weft.strategy.deferred import attributes_of, full_value_of, is_deferred, shard_of

EXPERT_AXIS = "expert_parallel"


def is_expert(parameter: Tensor) -> bool:
    """Return whether a parameter belongs to experts that are sharded over the axis expert_parallel."""
    return isinstance(parameter, DTensor) and EXPERT_AXIS in (parameter.device_mesh.mesh_dim_names or ())


def shard_parameter(
    parameter: nn.Parameter, mesh: DeviceMesh, placements: tuple[Placement, ...], keeps_deferred: bool
) -> nn.Parameter:
    """Return a parameter with a plain one's values that is a DTensor on a mesh; the ranks hold equal values.

    As `to_dtensor` for tensor-parallel shards: shards follow torch.chunk; attributes, requires_grad and the gradient
    are kept; a meta tensor stays meta, and a deferred one deferred if `keeps_deferred`.
    """
    with torch.no_grad():
        result = _shard(parameter, mesh, placements, keeps_deferred)
        result.requires_grad_(parameter.requires_grad)
        result._is_param = True  # nn.Parameter(result) would detach it first
        assert isinstance(result, nn.Parameter)
        if parameter.grad is not None:
            result.grad = _shard(parameter.grad, mesh, placements, keeps_deferred)
    result.__dict__.update(attributes_of(parameter))
    return result


def _shard(tensor: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], keeps_deferred: bool) -> DTensor:
    ranges = []  # (dim, start, length) of this rank's shard
    lengths = list(tensor.shape)
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard) and mesh.size(axis) > 1:
            dim = placement.dim
            start, lengths[dim] = shard_range(lengths[dim], mesh.size(axis), mesh.get_local_rank(axis))
            ranges.append((dim, start, lengths[dim]))
        else:
            assert isinstance(placement, (Shard, Replicate))
    local = tensor.detach()
    if is_deferred(tensor) and not keeps_deferred:
        if ranges:
            first, *ranges = ranges
            local, _ = shard_of(tensor, *first)
        else:
            local = full_value_of(tensor)
    for each in ranges:
        local = local.narrow(*each)
    if ranges:
        local = local.clone(memory_format=torch.contiguous_format)
    stride = torch.empty(tensor.shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=tensor.shape, stride=stride)
