"""A check that replicated parameters got the same gradient on every rank of the tensor-parallel group."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from weft.strategy.shards import TENSOR_PARALLEL
from weft.strategy.state import state_of

_TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-3}
_HALF_TOLERANCE = 3e-2
_FLOOR = 1e-6  # of all gradients' norm: below it a gradient is rounding, as that of a key's bias


def check_replicated_gradients(model: nn.Module) -> None:
    """Compare the gradients of a parallelized model's replicated parameters over the tensor-parallel group.

    A replicated parameter that is used between a column and a row layer gets only this rank's part of its gradient,
    and the ranks drift apart without a word. Call this once after the first backward, on every rank: one all-gather.

    Raises:
        ValueError: gradients differ, naming the parameters; on every rank.
    """
    mesh = _mesh_of(model)
    if mesh is None or mesh.size() == 1:
        return
    names, gradients = [], []
    for name, parameter in model.named_parameters():
        if _is_replicated(parameter, mesh) and parameter.requires_grad:
            names.append(name)
            grad = parameter.grad
            gradients.append(grad.to_local() if isinstance(grad, DTensor) else grad)
    if not names:
        return
    stats = torch.stack([_fingerprint(grad) for grad in gradients]).to(_device(mesh))
    gathered = stats.new_empty(mesh.size(), *stats.shape)
    dist.all_gather_into_tensor(gathered.view(-1), stats.view(-1), group=mesh.get_group())
    differing = _differing(gathered.cpu(), names, [p.dtype if p is not None else torch.float32 for p in gradients])
    if differing:
        raise ValueError(
            f"the gradients of the replicated parameters {', '.join(differing)} differ between the tensor-parallel "
            "ranks, so each rank holds only a part of them: give the layers before and after them the style "
            "'replicate'."
        )


def _device(mesh: DeviceMesh) -> torch.device:
    return torch.device(mesh.device_type)


def _mesh_of(model: nn.Module) -> DeviceMesh | None:
    states = (state_of(module) for module in model.modules())
    return next((state.mesh for state in states if state is not None), None)


def _is_replicated(parameter: Tensor, mesh: DeviceMesh) -> bool:
    """Along the tensor-parallel axis, whatever FSDP2 does along others."""
    if not isinstance(parameter, DTensor):
        return False
    own = parameter.device_mesh
    if own.ndim == 1:
        return own == mesh and parameter.placements[0].is_replicate()
    axis = (mesh.mesh_dim_names or (TENSOR_PARALLEL,))[0]
    names = own.mesh_dim_names or ()
    return axis in names and parameter.placements[names.index(axis)].is_replicate()


def _fingerprint(grad: Tensor | None) -> Tensor:
    """(exists, norm, sum with fixed random signs) in float64: partial gradients differ in the last two."""
    if grad is None:
        return torch.zeros(3, dtype=torch.float64)
    values = grad.detach().double().cpu().flatten()
    signs = torch.randint(0, 2, values.shape, generator=torch.Generator().manual_seed(values.numel()))
    signed_sum = torch.dot(values, signs.double().mul_(2).sub_(1))
    return torch.stack((torch.ones((), dtype=torch.float64), values.norm(), signed_sum))


def _differing(gathered: Tensor, names: list[str], dtypes: list[torch.dtype]) -> list[str]:
    floor = _FLOOR * gathered[..., 1].norm(dim=1).max()
    result = []
    for idx, (name, dtype) in enumerate(zip(names, dtypes, strict=True)):
        exists, norms, sums = gathered[:, idx].unbind(-1)
        bound = _TOLERANCES.get(dtype, _HALF_TOLERANCE) * norms.max() + floor
        spread = torch.maximum(norms.max() - norms.min(), sums.max() - sums.min())
        if not (bool(exists.min() == exists.max()) and bool(spread <= bound)):
            result.append(f"'{name}'")
    return result
