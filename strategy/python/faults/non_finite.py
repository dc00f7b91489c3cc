"""Finds values that are not finite, NaN or infinite, with few launches and without waiting for a device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def largest_values(tensors: Sequence[Tensor]) -> Tensor:
    """Return the largest absolute value of each plain tensor, `[len(tensors)]`, float64 on the first one's device.

    The value is NaN if an element is NaN, and infinite if one is infinite. An empty tensor gives 0. Each tensor is read
    once; tensors of one dtype and device are read in one launch where torch has a fused kernel.
    """
    result = torch.zeros(len(tensors), dtype=torch.float64, device=tensors[0].device if tensors else None)
    by_kind: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for idx, tensor in enumerate(tensors):
        if tensor.numel():
            by_kind.setdefault((tensor.dtype, tensor.device), []).append(idx)
    for indices in by_kind.values():
        values = [_values(tensors[idx]) for idx in indices]
        norms = torch.stack(torch._foreach_norm(values, math.inf))
        result[torch.tensor(indices, device=result.device)] = norms.to(result)
    return result


def _values(tensor: Tensor) -> Tensor:
    """Return the stored values: of a sparse tensor those that are not zero."""
    return tensor._values() if tensor.layout == torch.sparse_coo else tensor


def are_finite(tensors: Sequence[Tensor]) -> Tensor:
    """Return whether all elements of all plain tensors are finite, `[]`, bool, on the first one's device."""
    return largest_values(tensors).isfinite().all()


def is_set_on_any_rank(flag: Tensor, device: torch.device) -> bool:
    """Return whether a boolean scalar is true on any rank: one all-reduce of one number, read on the host once."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return bool(flag)
    number = flag.to(device, torch.int32)
    dist.all_reduce(number, dist.ReduceOp.MAX)
    return bool(number)
