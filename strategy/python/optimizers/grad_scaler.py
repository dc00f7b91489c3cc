"""Gradient scalers of float16 training, for parameters that are sharded over ranks.

A scaler leaves out a step whose gradients overflowed, and then reduces its scale. An overflow may be in a shard that
one rank alone holds, and all ranks must leave out the same steps.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from weft.strategy.data_parallel.local import local_shard
from weft.strategy.sharding.state import cached


def agree_on_overflow(scaler: GradScaler, *optimizers: Optimizer, group: dist.ProcessGroup | None = None) -> None:
    """Make a scaler leave out a step on all ranks if a gradient of any rank is not finite.

    Its `unscale_`, which `step` calls if the user's code has not, becomes collective, with an all-reduce of one number
    for each device. Scales stay equal on all ranks.

    Args:
        scaler: its class becomes a subclass of its class.
        optimizers: those whose gradients it unscales; they no longer leave out a step themselves, as torch's fused
            optimizers do.
        group: the ranks; None: all ranks of the job.
    """
    if not isinstance(scaler, _AgreesOnOverflow):
        scaler.__class__ = _agreeing_class(type(scaler))
    scaler.__dict__["_weft_group"] = group
    for optimizer in optimizers:
        if hasattr(optimizer, "_step_supports_amp_scaling"):
            optimizer._step_supports_amp_scaling = False


class _AgreesOnOverflow:
    """Marks the classes of scalers that `agree_on_overflow` has changed."""


@cached
def _agreeing_class(cls: type[GradScaler]) -> type[GradScaler]:
    return type(cls.__name__, (_AgreesOnOverflow, cls), {"__module__": cls.__module__, "_unscale_grads_": _unscale})


def _unscale(
    self: Any, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
) -> dict[torch.device, Tensor]:
    """Replace `GradScaler._unscale_grads_`, which does not mix DTensors of several meshes and plain tensors.

    Returns:
        For each device, `[]`, 1 if a gradient of any rank is not finite, else 0.
    """
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            gradient = local_shard(parameter.grad)
            if gradient.is_sparse:
                # In float16, the sum of an element's values may overflow.
                if gradient.dtype == torch.float16:
                    parameter.grad = gradient = gradient.coalesce()
                gradient = gradient._values()
            if gradient.dtype == torch.float16 and not allow_fp16:
                raise ValueError("the gradient scaler got float16 gradients; keep parameters in float32.")
            by_kind.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    # A rank without gradients, such as one with a frozen stage, takes part in the all-reduce, too.
    found = {device: found_inf.to(device, copy=True) for device in (found_inf.device, *(kind[0] for kind in by_kind))}
    for (device, _), gradients in by_kind.items():
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, found[device], inv_scale.to(device))
    for value in found.values() if dist.is_initialized() else ():
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self._weft_group)
    return found
