"""Checks that replicated parameters got the same gradient on every rank of the tensor-parallel group."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from weft.strategy.sharding.shards import TENSOR_PARALLEL
from weft.strategy.sharding.state import state_of

_TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-3}
_HALF_TOLERANCE = 3e-2
_CHUNK = 1 << 16  # elements
_FLOOR = 1e-6  # relative to the norm of all gradients; smaller differences are rounding, as for the bias of a key layer


def check_replicated_gradients(
    model: nn.Module,
    fingerprints: Mapping[Tensor, Tensor] | None = None,
    data_group: dist.ProcessGroup | None = None,
) -> None:
    """Compare the gradients of a parallelized model's replicated parameters over the tensor-parallel group.

    A replicated parameter between a column and a row layer gets only a partial gradient on each rank. Unless its module
    has the style replicate_sum_gradients, the parameter's values diverge between the ranks without an error. Call this
    once after the first backward, on every rank: it takes one all-gather, and an all-reduce over `data_group`.

    Args:
        model: a parallelized model.
        fingerprints: the results of `gradient_fingerprint` for gradients that have been freed.
        data_group: the data-parallel ranks, which have different shards of the gradients, or gradients of different
            data; None: no data parallelism.

    Raises:
        ValueError: gradients differ, naming the parameters; raised on all ranks of both groups.
    """
    mesh = _mesh_of(model)
    if mesh is None or mesh.size() == 1:
        return
    names, dtypes, local_fingerprints = [], [], []
    for name, parameter in model.named_parameters():
        if _is_replicated(parameter, mesh) and parameter.requires_grad:
            names.append(name)
            dtypes.append(parameter.dtype)
            given = None if fingerprints is None else fingerprints.get(parameter)
            local_fingerprints.append(gradient_fingerprint(parameter) if given is None else given)
    if not names:
        return
    stacked = torch.stack(local_fingerprints).to(_device(mesh))  # [parameter, 3]
    gathered = stacked.new_empty(mesh.size(), *stacked.shape)
    dist.all_gather_into_tensor(gathered.view(-1), stacked.view(-1), group=mesh.get_group())
    differing = _differing(gathered.cpu(), dtypes).to(stacked.device)
    if data_group is not None and data_group.size() > 1:
        dist.all_reduce(differing, dist.ReduceOp.MAX, group=data_group)
    if differing.any():
        shown = ", ".join(f"'{name}'" for name, differs in zip(names, differing.tolist(), strict=True) if differs)
        raise ValueError(
            f"the gradients of the replicated parameters {shown} differ between the tensor-parallel "
            "ranks, so each rank has only partial gradients: give the layers before and after them the style "
            "'replicate'."
        )


def _device(mesh: DeviceMesh) -> torch.device:
    return torch.device(mesh.device_type)


def _mesh_of(model: nn.Module) -> DeviceMesh | None:
    states = (state_of(module) for module in model.modules())
    return next((state.mesh for state in states if state is not None), None)


def _is_replicated(parameter: Tensor, mesh: DeviceMesh) -> bool:
    """Return whether a parameter is replicated along the tensor-parallel axis, whatever FSDP2 does along other axes."""
    if not isinstance(parameter, DTensor):
        return False
    parameter_mesh = parameter.device_mesh
    if parameter_mesh.ndim == 1:
        return parameter_mesh == mesh and parameter.placements[0].is_replicate()
    axis = (mesh.mesh_dim_names or (TENSOR_PARALLEL,))[0]
    names = parameter_mesh.mesh_dim_names or ()
    return axis in names and parameter.placements[names.index(axis)].is_replicate()


def gradient_fingerprint(parameter: Tensor) -> Tensor:
    """Return [gradient exists (0 or 1), its norm, its sum with fixed random signs], `[3]`, float64.

    For a gradient that is a DTensor, norm and sum are those of the local tensor. Both differ between ranks if the
    gradients are partial. The gradient is read in chunks to save memory: one replicated parameter may be most of a
    model.
    """
    if parameter.grad is None:
        return torch.zeros(3, dtype=torch.float64)
    grad = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
    generator = torch.Generator().manual_seed(grad.numel())
    square_sum = signed_sum = torch.zeros((), dtype=torch.float64)
    for chunk in grad.detach().flatten().split(_CHUNK):
        values = chunk.cpu().double()
        signs = torch.randint(0, 2, values.shape, generator=generator, dtype=torch.int8).mul_(2).sub_(1)
        square_sum = square_sum + values.square().sum()
        signed_sum = signed_sum + torch.dot(values, signs.double())
    return torch.stack((torch.ones((), dtype=torch.float64), square_sum.sqrt(), signed_sum))


def _differing(gathered: Tensor, dtypes: list[torch.dtype]) -> Tensor:
    """Return 1 for each parameter whose fingerprints `[rank, parameter, 3]` differ, 0 for the others.

    Gradients that are finite on no rank count as equal: the loss, not the sharding, is the cause.
    """
    is_finite = gathered.isfinite().all(-1)
    floor = _FLOOR * gathered[..., 1].where(is_finite, 0.0).norm(dim=1).max()
    result = torch.zeros(len(dtypes), dtype=torch.int32)
    for idx, dtype in enumerate(dtypes):
        if not is_finite[:, idx].all():
            result[idx] = bool(is_finite[:, idx].any())
            continue
        exists, norms, sums = gathered[:, idx].unbind(-1)
        bound = _TOLERANCES.get(dtype, _HALF_TOLERANCE) * norms.max() + floor
        spread = torch.maximum(norms.max() - norms.min(), sums.max() - sums.min())
        result[idx] = not (bool(exists.min() == exists.max()) and bool(spread <= bound))
    return result
