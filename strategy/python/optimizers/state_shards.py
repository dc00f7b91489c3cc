"""States of an optimizer that are shards like their parameter: elementwise states, and scales of blocks.

A parameter's local shard is a matrix: its rows are dim 0, its columns all other dims; a 1-D parameter is one row. A
quantized state has a code for each element and a scale for each block of at most 256 consecutive elements of a row. A
block begins at the start of a row of the *shard*, so that every rank steps its shard alone. If each rank's columns are
a multiple of 256, or each rank has full rows, the blocks are those of the unsharded parameter: the blocks are
*aligned*. Codes and scales are then DTensors that any mesh with aligned blocks reads. Other blocks depend on the mesh.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from weft.strategy._plan import shard_range
from weft.strategy.data_parallel.local import distributed, local_shard, sharding_order

BLOCK = 256  # elements; as in the kernels


@dataclass(frozen=True)
class Place:
    """The place of a local shard in its unsharded parameter, as a matrix.

    Attributes:
        row, column: of the shard's first element.
        full_columns: the columns of the unsharded parameter.
    """

    row: int
    column: int
    full_columns: int


def place_of(parameter: Tensor) -> Place:
    """Return the place of a parameter's local shard; that of a plain tensor is the beginning."""
    shape = parameter.shape
    if parameter.dim() == 0:
        return Place(0, 0, 1)
    offsets: tuple[int, ...] = (0,) * parameter.dim()
    if isinstance(parameter, DTensor):
        _, offsets = compute_local_shape_and_global_offset(shape, parameter.device_mesh, parameter.placements)
    if parameter.dim() == 1:
        return Place(0, offsets[0], shape[0])
    column = sum(offset * math.prod(shape[dim + 1 :]) for dim, offset in enumerate(offsets) if dim > 0)
    return Place(offsets[0], column, math.prod(shape[1:]))


def scale_shape(shape: torch.Size | tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the scales of a tensor of this shape: `[rows, blocks]`, or `[blocks]` for 1-D tensors."""
    if len(shape) == 1:
        return (-(-shape[0] // BLOCK),)
    return (shape[0], -(-math.prod(shape[1:]) // BLOCK))


def has_aligned_blocks(parameter: Tensor) -> bool:
    """Return whether the blocks of all ranks' shards are those of the unsharded parameter; equal on all ranks."""
    columns = _columns_of_shards(parameter)
    return all(size % BLOCK == 0 for size in columns[:-1]) or not any(columns[1:])


def _columns_of_shards(parameter: Tensor) -> list[int]:
    """Return the numbers of columns of the shards along a row of the unsharded parameter, in their order."""
    dims = range(parameter.dim())[-1:] if parameter.dim() < 2 else range(1, parameter.dim())
    sizes = []
    for dim in dims:
        of_dim = [parameter.shape[dim]]
        if isinstance(parameter, DTensor):
            for axis in sharding_order(parameter.placements):
                if parameter.placements[axis].is_shard(dim):
                    num_ranks = parameter.device_mesh.size(axis)
                    of_dim = [shard_range(size, num_ranks, rank)[1] for size in of_dim for rank in range(num_ranks)]
        sizes.append(of_dim)
    return [math.prod(each) for each in itertools.product(*sizes)]


def new_state(parameter: Tensor, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """Return zeros like a parameter in another dtype, contiguous; a DTensor if the parameter is one.

    `device`: None: the parameter's.
    """
    local = torch.zeros(local_shard(parameter).shape, dtype=dtype, device=device or parameter.device)
    return like_parameter(local, parameter)


def new_scale(parameter: Tensor, device: torch.device | None = None) -> Tensor:
    """Return the scales of a state of zeros, float32; a DTensor if the parameter is one. `device`: as in new_state."""
    local = torch.zeros(scale_shape(local_shard(parameter).shape), device=device or parameter.device)
    return scale_like_parameter(local, parameter)


def like_parameter(local: Tensor, parameter: Tensor) -> Tensor:
    """Return a state of the shape of a parameter's local shard as a tensor that is sharded like the parameter."""
    return _distributed(local, parameter, parameter.shape)


def scale_like_parameter(local: Tensor, parameter: Tensor) -> Tensor:
    """Return scales of a parameter's local shard as a tensor that is sharded like the parameter."""
    if not isinstance(parameter, DTensor):
        return local
    blocks = sum(-(-size // BLOCK) for size in _columns_of_shards(parameter))
    return _distributed(local, parameter, torch.Size((*parameter.shape[:1][: parameter.dim() - 1], blocks)))


def _distributed(local: Tensor, parameter: Tensor, shape: torch.Size) -> Tensor:
    if not isinstance(parameter, DTensor):
        return local
    stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return distributed(local, parameter, shape, stride)


def replace_data(parameter: Tensor, local: Tensor) -> None:
    """Replace the values of a parameter by a local shard of another dtype; the parameter stays the same object."""
    if not isinstance(parameter, DTensor):
        parameter.data = local
        return
    new = like_parameter(local, parameter)
    assert isinstance(new, DTensor)
    parameter.data = new
    parameter._local_tensor, parameter._spec = new._local_tensor, new._spec
