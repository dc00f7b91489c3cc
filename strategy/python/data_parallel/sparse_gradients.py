"""Averages sparse gradients, such as those of nn.Embedding(sparse=True), by all-gathers of their rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_NONE, _SPARSE, _DENSE = 0, 1, 2  # kinds of a rank's gradient


def sparse_parameters(model: nn.Module) -> dict[Tensor, str]:
    """Return the plain parameters of modules with sparse=True, whose gradients may be sparse, with their names."""
    found: dict[Tensor, str] = {}
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) is True:
            plain = (item for item in module.named_parameters(recurse=False) if not isinstance(item[1], DTensor))
            for key, parameter in plain:
                found.setdefault(parameter, f"{name}.{key}" if name else key)
    return found


def average_sparse_gradients(parameters: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Replace each gradient by its average over a group; collective, and on CUDA it waits for the device.

    The average of sparse gradients is sparse and coalesced: the ranks' rows are all-gathered, and each rank adds equal
    rows. A rank without a gradient counts as zeros; if no rank has one, the parameter keeps none. If a rank's gradient
    is dense, because the parameter is used in other modules, too, the average is dense.

    parameters: plain tensors, in the same order on all ranks.
    """
    if not parameters or group.size() == 1:
        return
    gradients = [_coalesced(parameter.grad) for parameter in parameters]
    own = torch.tensor([_kind_and_rows(each) for each in gradients], device=parameters[0].device)
    gathered = own.new_empty((group.size(), *own.shape))
    dist.all_gather_into_tensor(gathered, own, group=group)
    for idx, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
        kinds, num_rows = gathered[:, idx].unbind(1)
        kind = int(kinds.max())
        if kind == _SPARSE:
            parameter.grad = _sum_of_rows(parameter, gradient, num_rows.tolist(), group).div_(group.size())
        elif kind == _DENSE:
            dense = torch.zeros_like(parameter) if gradient is None else _dense(gradient)
            dist.all_reduce(dense.div_(group.size()), group=group)
            parameter.grad = dense


def _coalesced(gradient: Tensor | None) -> Tensor | None:
    return gradient.coalesce() if gradient is not None and gradient.is_sparse else gradient


def _kind_and_rows(gradient: Tensor | None) -> tuple[int, int]:
    if gradient is None:
        return _NONE, 0
    return (_SPARSE, gradient._nnz()) if gradient.is_sparse else (_DENSE, 0)


def _dense(gradient: Tensor) -> Tensor:
    return (gradient.to_dense() if gradient.is_sparse else gradient).contiguous()


def _sum_of_rows(
    parameter: Tensor, gradient: Tensor | None, num_rows: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    """Return the sum of the ranks' sparse gradients; `num_rows`: of each rank. Collective."""
    most = max(num_rows)
    indices = torch.zeros(most, dtype=torch.int64, device=parameter.device)
    values = parameter.new_zeros((most, *parameter.shape[1:]))
    if gradient is not None:
        indices[: gradient._nnz()] = gradient.indices()[0]
        values[: gradient._nnz()] = gradient.values()
    all_indices = indices.new_empty(group.size() * most)
    all_values = values.new_empty((group.size() * most, *values.shape[1:]))
    if most > 0:
        dist.all_gather_into_tensor(all_indices, indices, group=group)
        dist.all_gather_into_tensor(all_values, values, group=group)
    kept = [slice(rank * most, rank * most + rows) for rank, rows in enumerate(num_rows)]
    rows_of_ranks = torch.cat([all_indices[each] for each in kept])
    values_of_ranks = torch.cat([all_values[each] for each in kept])
    total = torch.sparse_coo_tensor(rows_of_ranks[None], values_of_ranks, parameter.shape, check_invariants=False)
    return total.coalesce()
