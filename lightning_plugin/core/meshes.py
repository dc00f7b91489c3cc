"""Creates the mesh of a run, or returns that of an earlier run with the same sizes."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from weft._plugin.data_axes import DATA_AXIS, REPLICATE_AXIS

if TYPE_CHECKING:
    from weft.strategy.experts.axes import ExpertAxes
    from weft.strategy.planning.layout import MeshSizes

TENSOR_AXIS = "tensor_parallel"
PIPELINE_AXIS = "pipeline_parallel"
CONTEXT_AXIS = "context_parallel"  # of layouts; in the mesh, its ranks are in data_parallel
EXPERT_AXIS = "expert_parallel"  # only in the mesh of experts


@dataclasses.dataclass(frozen=True)
class Groups:
    """Groups of this rank that are not those of one axis of the mesh.

    The axis data_parallel of the mesh has the context-parallel ranks, too, innermost: its neighbouring ranks form a
    context-parallel group. So whatever shards or averages over the axis includes them.

    gradients: the ranks that average gradients, along data_replicate and data_parallel; with context-parallel ranks.
    data: the ranks of `gradients` with the same place in their context-parallel group; they get different data.
    context: the context-parallel group; None: it has one rank.
    same_data: the ranks that compute one batch together: those along the context and tensor-parallel axes.
    experts: the axes of experts' parameters; None: there is one expert-parallel rank.
    """

    gradients: dist.ProcessGroup
    data: dist.ProcessGroup
    context: dist.ProcessGroup | None
    same_data: dist.ProcessGroup
    experts: ExpertAxes | None = None


# (default group, device type, has_stages, sizes) -> mesh and groups. The next run reuses them, because the model's
# DTensors are on this mesh, and because each new mesh creates process groups that exist until exit.
_meshes: dict[tuple[Any, ...], tuple[DeviceMesh, Groups]] = {}


def cached_mesh(stock: DeviceMesh, sizes: MeshSizes | None, has_stages: bool) -> tuple[DeviceMesh, Groups]:
    """Return the mesh with these sizes, and this rank's groups; collective.

    Args:
        stock: the mesh of Lightning's ModelParallelStrategy, with the axes data_parallel and tensor_parallel; its
            data_parallel axis combines the pipeline axis, both data axes and the context-parallel axis.
        sizes: the sizes of all axes; None: the sizes of `stock`.
        has_stages: whether there is a pipeline axis, even with one rank.
    """
    data_size, tensor_size = stock.shape
    num_stages = sizes.pipeline_parallel if sizes is not None else 1
    num_replicas = sizes.data_replicate if sizes is not None else 1
    num_context = sizes.context_parallel if sizes is not None else 1
    num_experts = sizes.expert_parallel if sizes is not None else 1
    shape_key = (num_stages, num_replicas, num_context, num_experts, data_size, tensor_size)
    key = (dist.group.WORLD, stock.device_type, has_stages, *shape_key)
    if key not in _meshes:
        mesh, group = stock, stock.get_group(DATA_AXIS)
        shape = {PIPELINE_AXIS: num_stages} if has_stages else {}
        shape |= {REPLICATE_AXIS: num_replicas} if num_replicas > 1 else {}
        shape |= {DATA_AXIS: data_size // num_replicas // num_stages, TENSOR_AXIS: tensor_size}
        if len(shape) > 2:
            mesh = init_device_mesh(stock.device_type, tuple(shape.values()), mesh_dim_names=tuple(shape))
        if num_stages > 1:
            group = mesh.get_group(DATA_AXIS) if num_replicas == 1 else _group_of_data_axes(mesh, num_stages)
        groups = _groups(mesh, group, num_context)
        if num_experts > 1:
            from weft.strategy.experts.axes import expert_axes

            groups = dataclasses.replace(groups, experts=expert_axes(stock.device_type, shape, num_experts))
        _meshes[key] = (mesh, groups)
    return _meshes[key]


def axis_sizes(mesh: DeviceMesh, groups: Groups) -> dict[str, int]:
    """Return the number of ranks of each axis, outer to inner; context_parallel only if it has a group.

    Then follows expert_parallel if there are several such ranks, which are among those along the other axes.
    """
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    if groups.context is not None:
        num_tensor = sizes.pop(TENSOR_AXIS)
        sizes[DATA_AXIS] //= groups.context.size()
        sizes |= {CONTEXT_AXIS: groups.context.size(), TENSOR_AXIS: num_tensor}
    if groups.experts is not None:
        sizes[EXPERT_AXIS] = groups.experts.size
    return sizes


def _groups(mesh: DeviceMesh, gradients: dist.ProcessGroup, num_context: int) -> Groups:
    """Return the groups of a mesh; with several context-parallel ranks, collective over the world."""
    tensor: dist.ProcessGroup = mesh.get_group(TENSOR_AXIS)
    if num_context == 1:
        return Groups(gradients, gradients, None, tensor)
    from weft.strategy.context.groups import context_groups

    groups = context_groups(mesh.mesh, num_context)
    return Groups(gradients, groups.data, groups.context, groups.same_data)


def _group_of_data_axes(mesh: DeviceMesh, num_stages: int) -> dist.ProcessGroup:
    """Return this rank's group along the axes data_replicate and data_parallel together; collective over the world."""
    ranks = mesh.mesh.reshape(num_stages, -1, mesh[TENSOR_AXIS].size()).transpose(1, 2).flatten(0, 1)
    group, _ = dist.new_subgroups_by_enumeration(ranks.tolist())
    assert isinstance(group, dist.ProcessGroup)
    return group
