"""The mesh of experts' parameters, beside the mesh of all other parameters of a job."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from weft.strategy.experts.shards import EXPERT_AXIS

_REPLICATE_AXIS, _DATA_AXIS, _TENSOR_AXIS = "data_replicate", "data_parallel", "tensor_parallel"


@dataclasses.dataclass(frozen=True)
class ExpertAxes:
    """The mesh of experts' parameters, with the same ranks as the mesh of all others.

    mesh: the axes data_parallel, whose ranks hold the same experts, and expert_parallel take the place of the axes
        data_parallel and tensor_parallel: each expert is on one rank along expert_parallel.
    size: the number of ranks along expert_parallel that have different data.
    gradients: the ranks that average gradients of this rank's experts, along data_replicate and data_parallel.
    """

    mesh: DeviceMesh
    size: int
    gradients: dist.ProcessGroup


def expert_axes(device_type: str, shape: Mapping[str, int], num_experts: int) -> ExpertAxes:
    """Return the axes of experts' parameters in a job's mesh; collective over the world.

    Args:
        shape: the number of ranks on each axis of the job's mesh, outer to inner; the axis data_parallel has the
            context-parallel ranks, too.
        num_experts: the number of expert-parallel ranks, which divides that of data_parallel.
    """
    num_holders, num_shards = shape[_DATA_AXIS] // num_experts, num_experts * shape[_TENSOR_AXIS]
    outer = {name: size for name, size in shape.items() if name not in (_DATA_AXIS, _TENSOR_AXIS)}
    divided = {**outer, _DATA_AXIS: num_holders, EXPERT_AXIS: num_shards}
    mesh = init_device_mesh(device_type, tuple(divided.values()), mesh_dim_names=tuple(divided))
    if _REPLICATE_AXIS not in divided:
        return ExpertAxes(mesh, num_experts, mesh.get_group(_DATA_AXIS))
    ranks = mesh.mesh.reshape(-1, divided[_REPLICATE_AXIS] * num_holders, num_shards).transpose(1, 2).flatten(0, 1)
    group, _ = dist.new_subgroups_by_enumeration(ranks.tolist())
    assert isinstance(group, dist.ProcessGroup)
    return ExpertAxes(mesh, num_experts, group)
