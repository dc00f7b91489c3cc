"""Converts parameters to DTensors: shards each one locally, without communication.

The ranks of a tensor-parallel group hold equal values already (each has built the same model), so a broadcast is not
necessary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from weft.strategy._plan import shard_range
from weft.strategy.deferred import attributes_of, full_value_of, is_deferred, shard_of
from weft.strategy.sharding import dtensor_reads  # noqa: F401  (registers reads of DTensors)

TENSOR_PARALLEL = "tensor_parallel"


def tensor_parallel_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the axis to shard over: a mesh of one axis itself, whatever its name, else its axis "tensor_parallel".

    Raises:
        TypeError: `mesh` is not a DeviceMesh.
        ValueError: `mesh` has several axes, none of that name.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"parallelize: mesh is a {type(mesh).__name__}; pass a torch DeviceMesh, made by init_device_mesh."
        )
    names = mesh.mesh_dim_names or ()
    if mesh.ndim == 1:
        return mesh
    if TENSOR_PARALLEL in names:
        return mesh[TENSOR_PARALLEL]
    raise ValueError(
        f"parallelize: the mesh has the axes {names or mesh.ndim} and none named '{TENSOR_PARALLEL}'; "
        "give one of the axes this name, or pass a mesh of one axis."
    )


def group_name_of(mesh: DeviceMesh) -> str:
    """Return the group's c10d name, an argument of the operators; "" (a group of one rank) for an axis of size 1."""
    return "" if mesh.size() == 1 else mesh.get_group().group_name


def _shard(tensor: Tensor, mesh: DeviceMesh, dim: int | None, keeps_deferred: bool) -> tuple[DTensor, bool]:
    """Return `tensor` as a DTensor: with a copy of this rank's shard along `dim`, or replicated if `dim` is None.

    A replicated tensor, or one on a mesh of one rank, is not copied. With `keeps_deferred` the local tensor of
    a deferred tensor is deferred, too. The second result: whether a deferred tensor had to be materialized in full to
    make a shard of it.
    """
    num_ranks = mesh.size()
    is_sharded = dim is not None and num_ranks > 1
    was_full = False
    materializes = is_deferred(tensor) and not keeps_deferred
    local = full_value_of(tensor) if is_deferred(tensor) and materializes and not is_sharded else tensor.detach()
    if dim is not None and is_sharded:
        start, length = shard_range(tensor.shape[dim], num_ranks, mesh.get_local_rank())
        if is_deferred(tensor) and materializes:
            local, is_drawn_in_chunks = shard_of(tensor, dim, start, length)
            was_full = not is_drawn_in_chunks
        else:
            local = local.narrow(dim, start, length).clone(memory_format=torch.contiguous_format)
        stride = torch.empty(tensor.shape, device="meta").stride()
    else:
        stride = tensor.stride()
    placement = Replicate() if dim is None else Shard(dim)
    dtensor = DTensor.from_local(local, mesh, [placement], run_check=False, shape=tensor.shape, stride=stride)
    return dtensor, was_full


def to_dtensor(
    parameter: nn.Parameter, mesh: DeviceMesh, dim: int | None, keeps_deferred: bool = False
) -> tuple[nn.Parameter, bool]:
    """Return a Parameter with a plain one's values that is a DTensor, sharded along `dim`, or replicated if None.

    Shards follow torch.chunk (the last ones smaller or empty). Attributes set on the parameter, requires_grad and the
    gradient are kept; a meta tensor stays meta, and a deferred one deferred if `keeps_deferred`. The second result:
    whether a deferred parameter had to be materialized in full to make a shard of it.
    """
    with torch.no_grad():
        result, was_full = _shard(parameter, mesh, dim, keeps_deferred)
        # nn.Parameter(result) would detach it first, which takes a DTensor milliseconds, and mark the copy so.
        result.requires_grad_(parameter.requires_grad)
        result._is_param = True
        assert isinstance(result, nn.Parameter)
        if parameter.grad is not None:
            result.grad, _ = _shard(parameter.grad, mesh, dim, keeps_deferred)
    result.__dict__.update(attributes_of(parameter))
    return result, was_full


def to_plain(parameter: nn.Parameter) -> nn.Parameter:
    """Return the parameter itself; a deferred one is materialized in full."""
    if not is_deferred(parameter):
        return parameter
    result = nn.Parameter(full_value_of(parameter), requires_grad=parameter.requires_grad)
    result.__dict__.update(attributes_of(parameter))
    return result
