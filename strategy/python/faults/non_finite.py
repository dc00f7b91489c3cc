"""Finds values that are not finite, NaN or infinite, with few launches and without waiting for a device."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def largest_values(tensors: Sequence[Tensor]) -> Tensor:
    """Return the largest absolute value of each plain tensor, `[len(tensors)]`, float64 on the CPU.

    The value is NaN if an element is NaN, and infinite if one is infinite. An empty tensor gives 0, a complex one the
    largest absolute real or imaginary part.
    """
    result = torch.zeros(len(tensors), dtype=torch.float64)
    for indices, values in _largest_by_kind(tensors):
        result[indices] = values.to(result)
    return result


def are_finite(tensors: Sequence[Tensor]) -> Tensor:
    """Return whether all elements of all plain tensors are finite, `[]`, bool, on the first one's device.

    Each tensor is read once; tensors of one dtype and device are read in one launch where torch has a fused kernel.
    """
    device = tensors[0].device if tensors else None
    flags = [values.isfinite().all().to(device) for _, values in _largest_by_kind(tensors)]
    return torch.stack(flags).all() if flags else torch.ones((), dtype=torch.bool, device=device)


def _largest_by_kind(tensors: Sequence[Tensor]) -> Iterator[tuple[list[int], Tensor]]:
    """Yield the indices of the tensors of each dtype and device that have elements, and their largest values."""
    by_kind: dict[tuple[torch.dtype, torch.device], dict[int, Tensor]] = {}
    for idx, tensor in enumerate(tensors):
        stored = tensor._values() if tensor.layout == torch.sparse_coo else tensor
        if stored.is_complex():
            stored = torch.view_as_real(stored.resolve_conj())
        if stored.numel():
            by_kind.setdefault((stored.dtype, stored.device), {})[idx] = stored
    for (_, device), values in by_kind.items():
        if device.type == "cpu":  # where torch's norm is not vectorized: it takes 20 times as long
            extremes = torch.stack([torch.stack(torch.aminmax(each)) for each in values.values()])
            yield list(values), extremes.abs().amax(1)
        else:
            yield list(values), torch.stack(torch._foreach_norm(list(values.values()), math.inf))


def is_set_on_any_rank(flag: Tensor, device: torch.device) -> bool:
    """Return whether a boolean scalar is true on any rank: one all-reduce of one number, read on the host once."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return bool(flag)
    number = flag.to(device, torch.int32)
    dist.all_reduce(number, dist.ReduceOp.MAX)
    return bool(number)
