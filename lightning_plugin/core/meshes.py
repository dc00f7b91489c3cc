"""Creates the mesh of a run, or returns that of an earlier run with the same sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from weft._plugin.data_axes import DATA_AXIS, REPLICATE_AXIS

if TYPE_CHECKING:
    from weft.strategy.planning.layout import MeshSizes

TENSOR_AXIS = "tensor_parallel"
PIPELINE_AXIS = "pipeline_parallel"

# (default group, device type, has_stages, sizes) -> mesh, and this rank's group along its data axes. The next run
# reuses the mesh, because the model's DTensors are on this mesh, and because each new mesh creates process groups that
# exist until exit.
_meshes: dict[tuple[Any, ...], tuple[DeviceMesh, dist.ProcessGroup]] = {}


def cached_mesh(stock: DeviceMesh, sizes: MeshSizes | None, has_stages: bool) -> tuple[DeviceMesh, dist.ProcessGroup]:
    """Return the mesh with these sizes, and this rank's group along its data axes; collective.

    Args:
        stock: the mesh of Lightning's ModelParallelStrategy, with the axes data_parallel and tensor_parallel; its
            data_parallel axis combines the pipeline axis and both data axes.
        sizes: the sizes of all axes; None: the sizes of `stock`.
        has_stages: whether there is a pipeline axis, even with one rank.
    """
    data_size, tensor_size = stock.shape
    num_stages = sizes.pipeline_parallel if sizes is not None else 1
    num_replicas = sizes.data_replicate if sizes is not None else 1
    key = (dist.group.WORLD, stock.device_type, has_stages, num_stages, num_replicas, data_size, tensor_size)
    if key not in _meshes:
        mesh, group = stock, stock.get_group(DATA_AXIS)
        shape = {PIPELINE_AXIS: num_stages} if has_stages else {}
        shape |= {REPLICATE_AXIS: num_replicas} if num_replicas > 1 else {}
        shape |= {DATA_AXIS: data_size // num_replicas // num_stages, TENSOR_AXIS: tensor_size}
        if len(shape) > 2:
            mesh = init_device_mesh(stock.device_type, tuple(shape.values()), mesh_dim_names=tuple(shape))
        if num_stages > 1:
            group = mesh.get_group(DATA_AXIS) if num_replicas == 1 else _group_of_data_axes(mesh, num_stages)
        _meshes[key] = (mesh, group)
    return _meshes[key]


def _group_of_data_axes(mesh: DeviceMesh, num_stages: int) -> dist.ProcessGroup:
    """Return this rank's group along the axes data_replicate and data_parallel together; collective over the world."""
    ranks = mesh.mesh.reshape(num_stages, -1, mesh[TENSOR_AXIS].size()).transpose(1, 2).flatten(0, 1).tolist()
    group, _ = dist.new_subgroups_by_enumeration(ranks)
    assert isinstance(group, dist.ProcessGroup)
    return group
