"""Clips gradients by their total norm, for gradients that are sharded in different ways."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from weft.strategy.data_parallel.local import local_shard

_ShardAxis = tuple[DeviceMesh, int]  # a mesh, and the index of one of its axes


def clip_gradients_by_norm(
    parameters: Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
    stages: dist.ProcessGroup | None = None,
    counted_elsewhere: Collection[Tensor] = (),
) -> Tensor:
    """Scale all gradients so that their total norm is at most `max_norm`; collective over the axes that shard them.

    Like torch's `clip_grad_norm_`, for any mix of plain tensors and of DTensors on any meshes: the norm counts each
    element of the unsharded model once. Takes one all-reduce of a few numbers for each mesh axis over which a gradient
    is sharded, and one of one number over `stages`.

    Args:
        parameters: the parameters whose gradients are scaled, in the same order on every rank of a mesh.
        max_norm: infinity clips nothing.
        norm_type: p of the p-norm; infinity for the largest absolute value.
        error_if_nonfinite: raise RuntimeError instead of scaling by a norm that is infinite or nan.
        stages: the group of a pipeline's ranks, which hold different parameters; the norm is that of the parameters of
            all stages. None: no pipeline.
        counted_elsewhere: those of `parameters` whose gradients another stage counts, such as copies of tied
            parameters; here their gradients are only scaled.

    Returns:
        The norm before clipping, `[]`, float32 (float64 if a gradient is float64, and with stages), on the gradients'
        device (the CPU if there are no gradients); equal on all ranks of the meshes and of `stages`.

    Raises:
        ValueError: a gradient is a partial DTensor.
    """
    by_axes: dict[tuple[_ShardAxis, ...], list[Tensor]] = {}
    elsewhere = {id(parameter) for parameter in counted_elsewhere}
    grads, locals_elsewhere = [], []
    for parameter in parameters:
        if parameter.grad is not None and id(parameter) in elsewhere:
            locals_elsewhere.append(local_shard(parameter.grad))
        elif parameter.grad is not None:
            grads.append(parameter.grad)
    if not grads and stages is None:
        return torch.zeros(())
    for grad in grads:
        by_axes.setdefault(_shard_axes(grad), []).append(local_shard(grad))
    is_double = stages is not None or any(grad.dtype == torch.float64 for grad in grads)
    dtype = torch.float64 if is_double else torch.float32
    is_max = math.isinf(norm_type)
    powers = {axes: _power(locals_, norm_type, dtype) for axes, locals_ in by_axes.items()}
    for shard_axis in dict.fromkeys(shard_axis for axes in powers for shard_axis in axes):
        mesh, axis_idx = shard_axis
        on_axis = [axes for axes in powers if shard_axis in axes]
        sums = torch.stack([powers[axes] for axes in on_axis])
        dist.all_reduce(sums, op=dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, group=mesh.get_group(axis_idx))
        powers.update(zip(on_axis, sums.unbind(), strict=True))
    device = (grads or locals_elsewhere or [torch.zeros(())])[0].device
    all_powers = torch.stack(list(powers.values())) if powers else torch.zeros(1, dtype=dtype, device=device)
    total = all_powers.max() if is_max else all_powers.sum()
    if stages is not None:
        dist.all_reduce(total, op=dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, group=stages)
    norm = total if is_max else total.pow(1 / norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(
            f"the gradients' norm of order {norm_type} is {norm.item()}; find the batch or the layer that made it, or "
            "pass error_if_nonfinite=False."
        )
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for locals_ in (*by_axes.values(), locals_elsewhere):
        for each in _by_dtype_and_device(locals_):
            torch._foreach_mul_(each, factor.to(each[0].dtype))
    return norm


def _shard_axes(grad: Tensor) -> tuple[_ShardAxis, ...]:
    """Return the axes, of more than one rank, over which a gradient is sharded; raises ValueError for a partial one."""
    if not isinstance(grad, DTensor):
        return ()
    mesh = grad.device_mesh
    found = []
    for axis_idx, placement in enumerate(grad.placements):
        if placement.is_partial():
            raise ValueError(
                "clip_gradients_by_norm: a gradient is a partial DTensor, of which each rank has only an addend; "
                "redistribute the gradient first."
            )
        if not placement.is_replicate() and mesh.size(axis_idx) > 1:
            found.append((mesh, axis_idx))
    return tuple(found)


def _power(locals_: list[Tensor], norm_type: float, dtype: torch.dtype) -> Tensor:
    """Return the sum of |element|^p over local gradients, `[]`; for p = infinity, the largest |element|."""
    norms = []
    for each in _by_dtype_and_device([local for local in locals_ if local.numel()]):
        norms += [
            norm.to(dtype) for norm in torch._foreach_norm(each, norm_type, dtype=_accumulation_dtype(each[0].dtype))
        ]
    if not norms:
        return torch.zeros((), dtype=dtype, device=locals_[0].device)
    stacked = torch.stack(norms)
    return stacked.max() if math.isinf(norm_type) else stacked.pow(norm_type).sum()


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _by_dtype_and_device(tensors: list[Tensor]) -> list[list[Tensor]]:
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(kinds.values())
