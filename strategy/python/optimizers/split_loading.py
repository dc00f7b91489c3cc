"""Loads weights into models whose optimizers have split them."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from weft import ops
from weft.strategy.data_parallel.local import local_shard, shard_like
from weft.strategy.optimizers import state_shards
from weft.strategy.optimizers.low_precision import LowPrecisionOptimizer
from weft.strategy.optimizers.state_format import LOW_BITS
from weft.strategy.parameter_names import unwrapped


class SplitOnLoad:
    """A hook before `load_state_dict`: float32 values of split weights give these weights all their bits.

    Values of other dtypes have no lower bits; those of a checkpoint come with its optimizer.
    """

    def __init__(self, optimizer: LowPrecisionOptimizer, model: nn.Module) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._names: dict[Tensor, str] = {p: unwrapped(name) for name, p in model.named_parameters()}

    def __getstate__(self) -> dict[str, Any]:
        return {"_optimizer": _no_optimizer, "_names": {}}  # a copy of the model has no optimizer

    @torch.no_grad()
    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        optimizer = self._optimizer()
        if optimizer is None:
            return
        keys = {unwrapped(key): key for key in state_dict}
        for parameter, states in optimizer.state.items():
            key = keys.get(prefix + self._names.get(parameter, ""))
            if key is None or LOW_BITS not in states:
                continue
            value, low_bits = state_dict[key], local_shard(states[LOW_BITS])
            if isinstance(parameter, DTensor) and not isinstance(value, DTensor) and value.shape == parameter.shape:
                value = shard_like(value, parameter)
            local = local_shard(value)
            if local.dtype != torch.float32 or local.shape != low_bits.shape:
                low_bits.zero_()
                continue
            high, low = ops.split_float(local.to(low_bits.device).contiguous(), low_bits.dtype)
            low_bits.copy_(low)
            state_dict[key] = state_shards.like_parameter(high, parameter)


def _no_optimizer() -> None:
    return None


def splits_weights(optimizer: Optimizer) -> bool:
    """Return whether an optimizer has split weights; Fabric's wrapper of an optimizer is looked through."""
    own = getattr(optimizer, "optimizer", optimizer)
    return isinstance(own, LowPrecisionOptimizer) and own.format.weights != "float32"


def target_for_loading(state: Mapping[str, Any], saved_dtypes: Mapping[str, torch.dtype]) -> dict[str, Any]:
    """Return a model's state into which a checkpoint is loaded: bfloat16 tensors are float32 where the checkpoint is.

    So weights that are split get all their bits. `saved_dtypes`: of the checkpoint's tensors, by the state's names.
    """
    return {
        name: torch.empty_like(value, dtype=torch.float32)
        if isinstance(value, Tensor) and value.dtype == torch.bfloat16 and saved_dtypes.get(name) == torch.float32
        else value
        for name, value in state.items()
    }
