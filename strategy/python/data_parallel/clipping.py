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
    elsewhere = {id(parameter) for parameter in counted_elsewhere}
    with_grads = [parameter for parameter in parameters if parameter.grad is not None]
    grads = [parameter.grad for parameter in with_grads if parameter.grad is not None]
    if not grads and stages is None:
        return torch.zeros(())
    norm = GradientNorm(norm_type)
    norm.add(grad for grad, parameter in zip(grads, with_grads, strict=True) if id(parameter) not in elsewhere)
    total = norm.total(stages, grads[0].device if grads else None)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"the gradients' norm of order {norm_type} is {total.item()}; find the batch or the layer that made it, or "
            "pass error_if_nonfinite=False."
        )
    factor = clipping_factor(total, max_norm)
    for each in _by_dtype_and_device([_stored(local_shard(grad)) for grad in grads]):
        torch._foreach_mul_(each, factor.to(each[0].dtype))
    return total


def clipping_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor, at most 1, that clips gradients of norm `norm`, `[]`, to `max_norm`; as in torch."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


class GradientNorm:
    """The norm of gradients that need not exist at the same time: `add` all of them, then call `total`.

    Each element of the unsharded model counts once, for any mix of plain tensors and of DTensors on any meshes.

    norm_type: p of the p-norm; infinity for the largest absolute value.
    parameters: those whose gradients may be added, in the same order on every rank of a mesh. `total` communicates in
        this order, whatever the order of `add`, and also for parameters without a gradient on this rank.
    """

    def __init__(self, norm_type: float = 2.0, parameters: Iterable[Tensor] = ()) -> None:
        self._norm_type = norm_type
        self._powers: dict[tuple[_ShardAxis, ...], Tensor] = {}  # float64
        self._has_double = False
        self._device = torch.device("cpu")
        for parameter in parameters:
            self._add(_shard_axes(parameter), [local_shard(parameter).new_empty(0)])

    def add(self, gradients: Iterable[Tensor]) -> None:
        """Add gradients.

        Raises:
            ValueError: a gradient is a partial DTensor.
        """
        by_axes: dict[tuple[_ShardAxis, ...], list[Tensor]] = {}
        for gradient in gradients:
            coalesced = gradient.coalesce() if gradient.is_sparse else gradient
            by_axes.setdefault(_shard_axes(gradient), []).append(_stored(local_shard(coalesced)))
        for axes, locals_ in by_axes.items():
            self._add(axes, locals_)

    def add_shard(self, parameter: Tensor, local: Tensor) -> None:
        """Add some elements of the gradient of a parameter: plain values of this rank's shard."""
        self._add(_shard_axes(parameter), [local])

    def _add(self, axes: tuple[_ShardAxis, ...], locals_: list[Tensor]) -> None:
        self._device = locals_[0].device
        self._has_double |= any(local.dtype == torch.float64 for local in locals_)
        power = _power(locals_, self._norm_type)
        before = self._powers.get(axes)
        if before is None:
            self._powers[axes] = power
        else:
            self._powers[axes] = torch.maximum(before, power) if math.isinf(self._norm_type) else before + power

    def total(self, stages: dist.ProcessGroup | None = None, device: torch.device | None = None) -> Tensor:
        """Return the norm; collective over the axes that shard gradients, and over `stages`.

        Takes one all-reduce of a few numbers for each of these axes, and one of one number over `stages`.

        Args:
            stages: the group of a pipeline's ranks, which have added different gradients; None: no pipeline.
            device: of the result; default: that of the gradients.

        Returns:
            `[]`, float32, or float64 if a gradient is float64 or with stages; equal on all ranks.
        """
        is_max = math.isinf(self._norm_type)
        operation = dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM
        dtype = torch.float64 if stages is not None or self._has_double else torch.float32
        powers = {axes: power.to(dtype) for axes, power in self._powers.items()}
        for shard_axis in dict.fromkeys(shard_axis for axes in powers for shard_axis in axes):
            mesh, axis_idx = shard_axis
            on_axis = [axes for axes in powers if shard_axis in axes]
            sums = torch.stack([powers[axes] for axes in on_axis])
            dist.all_reduce(sums, op=operation, group=mesh.get_group(axis_idx))
            powers.update(zip(on_axis, sums.unbind(), strict=True))
        all_powers = [power.to(device or self._device) for power in powers.values()]
        stacked = torch.stack(all_powers or [torch.zeros((), dtype=dtype, device=device or self._device)])
        total = stacked.max() if is_max else stacked.sum()
        if stages is not None:
            dist.all_reduce(total, op=operation, group=stages)
        return total if is_max else total.pow(1 / self._norm_type)


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


def _stored(local: Tensor) -> Tensor:
    """Return the values of a sparse tensor, which share its memory; a dense tensor unchanged."""
    return local._values() if local.is_sparse else local


def _power(locals_: list[Tensor], norm_type: float) -> Tensor:
    """Return the sum of |element|^p over local gradients, `[]`, float64; for p = infinity, the largest |element|."""
    norms = []
    for each in _by_dtype_and_device([local for local in locals_ if local.numel()]):
        norms += [
            norm.double() for norm in torch._foreach_norm(each, norm_type, dtype=_accumulation_dtype(each[0].dtype))
        ]
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=locals_[0].device)
    stacked = torch.stack(norms)
    return stacked.max() if math.isinf(norm_type) else stacked.pow(norm_type).sum()


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _by_dtype_and_device(tensors: list[Tensor]) -> list[list[Tensor]]:
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(kinds.values())
