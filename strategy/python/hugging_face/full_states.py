"""States of a model and of its optimizer as one process would have them, gathered from shards and sharded again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from weft.strategy.data_parallel.local import shard_like
from weft.strategy.optimizers.saved_states import device_of_states, states_to_load, states_to_save


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """Return `model.state_dict()` with unsharded tensors on the CPU; collective.

    Rank 0 gets the tensors, a tied parameter as one tensor under all its names; the other ranks get {}.
    """
    full: dict[int, Tensor] = {}
    state: dict[str, Any] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor) and id(value) not in full:
            full[id(value)] = _full(value)
        state[name] = full[id(value)] if isinstance(value, Tensor) else value
    return state if dist.get_rank() == 0 else {}


def full_optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    """Return `optimizer.state_dict()` with unsharded tensors on the CPU; collective.

    Rank 0 gets the state; the other ranks get {}. Quantized states are converted to float32.
    """
    ordered = _parameters(optimizer)
    state_dict = optimizer.state_dict()
    state = {}
    for idx, values in state_dict["state"].items():
        in_float32 = states_to_save(values, ordered[idx], in_float32=True)
        state[idx] = {name: _full(value) if isinstance(value, Tensor) else value for name, value in in_float32.items()}
    return {**state_dict, "state": state} if dist.get_rank() == 0 else {}


def load_full_optimizer_state(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Load a state of unsharded tensors, of which this rank copies its shards; the same state on all ranks."""
    ordered = _parameters(optimizer)
    state: dict[int, dict[str, Any]] = {}
    for idx, values in saved["state"].items():
        parameter = ordered[idx]
        state[idx] = dict(states_to_load(optimizer, values, parameter))
        for name, value in state[idx].items():
            if isinstance(parameter, DTensor) and isinstance(value, Tensor) and value.shape == parameter.shape:
                state[idx][name] = shard_like(value, parameter, device_of_states(optimizer, parameter))
    optimizer.load_state_dict({**saved, "state": state})


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _full(value: Tensor) -> Tensor:
    """Return the full tensor on rank 0 and, without its values, on the other ranks."""
    full = value.full_tensor() if isinstance(value, DTensor) else value
    return full.detach().cpu() if dist.get_rank() == 0 else full.new_empty(0)
