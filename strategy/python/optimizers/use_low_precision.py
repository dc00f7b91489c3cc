"""Makes an optimizer of torch a low-precision one, and splits its weights."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import SGD, Optimizer

from weft import memory
from weft.strategy.data_parallel.local import local_shard
from weft.strategy.optimizers.low_precision import VARIANTS, LowPrecisionOptimizer
from weft.strategy.optimizers.split_loading import SplitOnLoad
from weft.strategy.optimizers.state_format import StateFormat
from weft.strategy.parameter_names import parameter_names


def use_low_precision(optimizer: Optimizer, model: nn.Module | None, state_format: StateFormat) -> None:
    """Make an optimizer without states use low-precision states, and split its weights, as `state_format` says.

    The optimizer stays the same object, of a subclass of its class. `model` names the parameters: the rounding of a
    parameter's states depends on its name, not on its shard or on the other parameters. Copies of a tied weight on
    several stages of a pipeline have one name, so that they stay equal.

    Raises:
        ValueError: the optimizer's class or options have no low-precision variant, or it has states already.
    """
    _check(optimizer)
    for flags in (optimizer.defaults, *optimizer.param_groups):
        flags.update(fused=False, foreach=False)
    vars(optimizer).pop("step", None)  # a scheduler's wrapper, see above
    optimizer.__class__ = VARIANTS[type(optimizer)]
    assert isinstance(optimizer, LowPrecisionOptimizer)
    optimizer._step_supports_amp_scaling = False
    optimizer.format = state_format
    names = {} if model is None else parameter_names(model)
    ordered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    optimizer._seeds = {p: zlib.crc32(names.get(p, str(idx)).encode()) for idx, p in enumerate(ordered)}
    optimizer._places, optimizer._rows = {}, {}
    units = [] if model is None else [module for module in model.modules() if isinstance(module, FSDPModule)]
    optimizer.split_weights(optimizer.param_groups, {p for unit in units for p in unit.parameters()})
    if state_format.weights != "float32" and model is not None:
        for unit in units:
            _update_unit(unit)
        memory.tag_parameters(model)
        model.register_load_state_dict_pre_hook(SplitOnLoad(optimizer, model))


def _check(optimizer: Optimizer) -> None:
    """Raise ValueError if an optimizer has no low-precision variant."""
    name = type(optimizer).__name__
    reason = None
    if type(optimizer) not in VARIANTS:
        known = ", ".join(cls.__name__ for cls in VARIANTS)
        reason = f"of class {name}, and only {known} have low-precision states"
    elif any(optimizer.state.values()):
        reason = f"{name} that has made a step already"
    else:
        for group in optimizer.param_groups:
            if type(optimizer) is SGD and group["momentum"] == 0:
                reason = "SGD without momentum, which has no states"
            for flag in ("amsgrad", "capturable", "differentiable"):
                if group.get(flag):
                    reason = f"{name} with {flag}=True"
            for parameter in group["params"]:
                if parameter.dtype not in (torch.float32, torch.bfloat16):
                    reason = f"{name} with a parameter of dtype {parameter.dtype}"
                elif not local_shard(parameter).is_contiguous():
                    reason = f"{name} with a parameter of shape {list(parameter.shape)} that is not contiguous"
    wrapper = vars(optimizer).get("step")
    if reason is None and wrapper is not None and not hasattr(wrapper, "_wrapped_by_lr_sched"):
        reason = f"{name} whose step() is replaced"
    if reason is not None:
        raise ValueError(
            f"got an optimizer {reason}; pass optimizer_state='float32' and master_weights='float32', or another "
            "optimizer."
        )


def _update_unit(unit: FSDPModule) -> None:
    """Make FSDP2 gather the new local shards of a unit in their dtype, also if it has gathered the old ones before."""
    unit.reshard()
    state: Any = unit._get_fsdp_state()
    # Newer versions of torch have several groups in a unit.
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    for group in groups:
        if group is None:
            continue
        for fsdp_param in group.fsdp_params:
            fsdp_param.reset_sharded_param()
            fsdp_param.all_gather_outputs = []
            vars(fsdp_param).pop("_unsharded_param", None)
        group._init_mp_dtypes()
