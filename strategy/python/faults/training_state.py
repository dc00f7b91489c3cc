"""Lists the parameters and the tensors of optimizers' states that several ranks should hold with equal values.

A plain tensor is replicated along all axes of the mesh, except for the pipeline's, whose ranks hold different layers. A
DTensor is sharded along some axes of its own mesh and replicated along all others. Buffers are not listed: running
statistics, such as BatchNorm's, are those of a rank's own data.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from weft.strategy.data_parallel.local import local_shard
from weft.strategy.data_parallel.sharded_states import is_elementwise_state, sharded_states_of
from weft.strategy.faults.replicas import Replica


def replicas_of(
    names: Mapping[Tensor, str],
    optimizers: Sequence[Optimizer],
    mesh: DeviceMesh,
    *,
    stage_axis: str | None = None,
    tied: Collection[str] = (),
) -> Iterator[Replica]:
    """Yield the tensors of this rank to be compared, parameters first; a tensor on an unknown mesh is left out.

    Args:
        names: this rank's parameters, in the model's order, with names that are equal on all ranks that hold them:
            sharded experts, with `mesh` that of experts, or all others.
        optimizers: the tensors of their states are named like "exp_avg of layer.weight".
        mesh: has all ranks and named axes.
        stage_axis: the mesh's axis of pipeline stages, whose ranks hold different parameters.
        tied: the names of parameters that several stages hold; they are compared along `stage_axis`, too.
    """
    every_axis = frozenset(mesh.mesh_dim_names or ())

    def known_axes(tensor: Tensor, name: str) -> frozenset[str]:
        axes = replicated_axes(tensor, every_axis)
        return axes if stage_axis is None or name in tied else axes - {stage_axis}

    axes_of = {}
    for parameter, name in names.items():
        axes_of[parameter] = known_axes(parameter, name)
        if not parameter.is_meta:
            yield Replica(name, local_shard(parameter), axes_of[parameter])
    for idx, optimizer in enumerate(optimizers):
        suffix = f" (optimizer {idx})" if len(optimizers) > 1 else ""
        sharded = sharded_states_of(optimizer)
        state_axes: frozenset[str] = frozenset()
        if sharded is not None and names:
            state_axes = _axes_of(mesh, sharded.group_of(next(iter(names))))  # the same for all of them
        for parameter, name in names.items():
            key = parameter if sharded is None else sharded.flat_shard_of(parameter)
            if key is None or key not in optimizer.state:
                continue
            for state_name, value in optimizer.state[key].items():
                if not isinstance(value, Tensor):
                    continue
                axes = axes_of[parameter]
                if isinstance(value, DTensor):
                    axes = known_axes(value, name)
                elif value.dim() == 0 and state_name == "step":
                    axes = every_axis if stage_axis is None or name in tied else every_axis - {stage_axis}
                elif sharded is not None and is_elementwise_state(state_name, value, key.shape):
                    axes = axes - state_axes
                # Any other plain tensor may depend on this rank's shard of the parameter, such as a norm.
                yield Replica(f"{state_name} of {name}{suffix}", local_shard(value), axes)


def replicated_axes(tensor: Tensor, every_axis: frozenset[str]) -> frozenset[str]:
    """Return the axes along which all ranks hold the same values; none if a DTensor has a mesh without these axes."""
    if not isinstance(tensor, DTensor):
        return every_axis
    axes = tensor.device_mesh.mesh_dim_names or ("",)
    if not set(axes) <= every_axis:
        return frozenset()
    return every_axis - {
        axis for axis, placement in zip(axes, tensor.placements, strict=True) if not placement.is_replicate()
    }


def _axes_of(mesh: DeviceMesh, group: dist.ProcessGroup) -> frozenset[str]:
    """Return the names of the axes along which the ranks of a group, one of which is this rank, differ."""
    ranks = dist.get_process_group_ranks(group)
    places = [(mesh.mesh == rank).nonzero()[0].tolist() for rank in ranks]
    return frozenset(
        name
        for name, along in zip(mesh.mesh_dim_names or (), zip(*places, strict=True), strict=True)
        if len(set(along)) > 1
    )
