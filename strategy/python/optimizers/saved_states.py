"""Converts the states of low-precision optimizers for checkpoints, and back on another mesh or in another format.

A checkpoint directory has codes and scales if their blocks are aligned (see `state_shards`): every mesh reads these.
Other quantized states are saved in float32. Single files, for any Trainer, have float32 states. Lower bits of weights
are saved as they are, beside the bfloat16 weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from weft import ops
from weft.strategy.data_parallel.local import distributed, local_shard, shard_like
from weft.strategy.optimizers import state_shards
from weft.strategy.optimizers.low_precision import LowPrecisionOptimizer
from weft.strategy.optimizers.offloaded_states import OffloadedOptimizer
from weft.strategy.optimizers.split_loading import splits_weights
from weft.strategy.optimizers.state_format import LOW_BITS, SCALE
from weft.strategy.optimizers.state_shards import BLOCK, has_aligned_blocks, place_of


def states_to_save(values: Mapping[str, Any], parameter: Tensor, in_float32: bool = False) -> dict[str, Any]:
    """Return the states of a parameter as they are saved.

    Quantized states become float32 with `in_float32`, and if their blocks depend on the mesh.
    """
    if not any(name.endswith(SCALE) for name in values) or (not in_float32 and has_aligned_blocks(parameter)):
        return dict(values)
    return _without_scales(values, lambda codes, scale: _dequantized(codes, scale, parameter))


def device_of_states(optimizer: Optimizer, parameter: Tensor) -> torch.device:
    """Return the device of a parameter's states in an optimizer."""
    on_cpu = isinstance(optimizer, OffloadedOptimizer)
    return torch.device("cpu") if on_cpu else parameter.device


def empty_state(name: str, saved: TensorStorageMetadata, parameter: Tensor, device: torch.device) -> Tensor:
    """Return a tensor into which a saved state of a parameter is read, sharded like the parameter if it has its shape.

    Args:
        saved: describes the saved state.
        device: of the tensor, if the parameter is sharded.
    """
    shape, dtype = saved.size, saved.properties.dtype
    if (scale := _empty_scale(name, shape, parameter, device)) is not None:
        return scale
    # A state of the parameter's shape is sharded like the parameter. A step count is not, although its shape () equals
    # that of a scalar parameter.
    if isinstance(parameter, DTensor) and shape == parameter.shape and (shape or name != "step"):
        local = torch.empty_like(local_shard(parameter), dtype=dtype, device=device)
        return distributed(local, parameter, parameter.shape, parameter.stride())
    return torch.empty(shape, dtype=dtype)


def _empty_scale(name: str, shape: torch.Size, parameter: Tensor, device: torch.device) -> Tensor | None:
    """Return the tensor into which a saved scale of a parameter is read; None if the state `name` is no scale.

    It has the columns that this rank's shard needs: its own if blocks are aligned, else those of the full parameter.
    """
    if not name.endswith(SCALE) or shape != state_shards.scale_shape(parameter.shape):
        return None
    if has_aligned_blocks(parameter):
        return state_shards.new_scale(parameter, device)
    assert isinstance(parameter, DTensor)
    rows = len(local_shard(parameter))
    placements = [p if p.is_shard(0) else Replicate() for p in parameter.placements]
    local = torch.empty(rows, shape[1], device=device)
    return distributed(local, parameter, shape, (shape[1], 1), placements)


def states_to_load(optimizer: Optimizer, values: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
    """Return saved states of a parameter as the optimizer's `load_state_dict` takes them.

    Args:
        values: full tensors; or DTensors sharded like the parameter, with scales as `empty_state` makes them.

    States that the optimizer does not quantize, or whose blocks are not those of this mesh, become float32. Lower bits
    of a parameter that is float32 in this run are joined to it, in place.
    """
    values = dict(values)
    if LOW_BITS in values and not (splits_weights(optimizer) and parameter.dtype == torch.bfloat16):
        _join_to(parameter, values.pop(LOW_BITS))
    quantizes = isinstance(optimizer, LowPrecisionOptimizer) and optimizer.format.states == "int8"
    if quantizes and has_aligned_blocks(parameter) and not _has_full_tensors(values, parameter):
        return values
    return _without_scales(values, lambda codes, scale: _dequantized(codes, scale, parameter))


def _without_scales(values: Mapping[str, Any], dequantize: Any) -> dict[str, Any]:
    return {
        name: dequantize(value, values[name + SCALE]) if name + SCALE in values else value
        for name, value in values.items()
        if not name.endswith(SCALE)
    }


def _has_full_tensors(values: Mapping[str, Any], parameter: Tensor) -> bool:
    return isinstance(parameter, DTensor) and not all(
        isinstance(values[name.removesuffix(SCALE)], DTensor) for name in values if name.endswith(SCALE)
    )


def _dequantized(codes: Tensor, scale: Tensor, parameter: Tensor) -> Tensor:
    """Return codes in float32: full if the codes are a full tensor, else sharded like the parameter."""
    local, local_scale = local_shard(codes), local_shard(scale).to(codes.device)
    if not isinstance(codes, DTensor) or local_scale.shape == state_shards.scale_shape(local.shape):
        values = ops.dequantize_blocks(local.contiguous(), local_scale.contiguous())
        return state_shards.like_parameter(values, parameter) if isinstance(codes, DTensor) else values
    # Blocks of the full row: pad the shard to the left, to the beginning of its first block.
    column, rows = place_of(parameter).column, len(local)
    flat = local.reshape(rows, -1)
    first_block, padding = column // BLOCK, column % BLOCK
    padded = torch.cat([flat.new_zeros(rows, padding), flat], dim=1)
    num_blocks = -(-padded.shape[1] // BLOCK)
    values = ops.dequantize_blocks(padded, local_scale[:, first_block : first_block + num_blocks].contiguous())
    return state_shards.like_parameter(values[:, padding:].reshape(local.shape).contiguous(), parameter)


@torch.no_grad()
def _join_to(parameter: Tensor, low_bits: Tensor) -> None:
    """Give a float32 parameter, which has the values of the saved bfloat16 weights, the lower bits, too."""
    local = local_shard(parameter)
    if local.dtype == torch.float32:
        low = low_bits
        if isinstance(parameter, DTensor) and not isinstance(low, DTensor):
            low = shard_like(low, parameter)
        low = local_shard(low).to(local.device).contiguous()
        local.copy_(ops.join_float(local.to(torch.bfloat16).contiguous(), low))
