"""Saves optimizer state by parameter name, or by index for single files, and loads it, without an optimizer step.

torch's `get_optimizer_state_dict` runs `optimizer.step()` on an optimizer that has no state yet, and Lightning's
loading fails on a checkpoint without state (SGD without momentum; anything saved before the first step).

The format by name is torch's: {"state": {parameter name: {"exp_avg": Tensor, ...}}, "param_groups": [{"params":
[names], "lr": ..., ...}]}. If a parameter is a DTensor, a tensor of its state is either a DTensor of the same global
shape and placements or a plain tensor, such as a step count. Scales of quantized states are DTensors, too; see
`weft.strategy.optimizers.saved_states`.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from weft.strategy.parameter_names import parameter_names

if TYPE_CHECKING:
    from weft.strategy.checkpoint import Checkpoint
    from weft.strategy.data_parallel import ShardedStates
    from weft.strategy.optimizers.expert_states import ExpertStates


@dataclasses.dataclass(frozen=True)
class FullModel:
    """Describes the full model whose stages the ranks of a pipeline hold.

    parameter_names: the names that `parameter_names` returned before the division into stages, in the model's order.
    pipeline_group: the ranks that hold the model's stages, including this rank.
    """

    parameter_names: tuple[str, ...]
    pipeline_group: dist.ProcessGroup


def merge_parameter_groups(state: dict[str, Any], pipeline_group: dist.ProcessGroup) -> None:
    """Add the parameters of all stages to the groups of a state keyed by parameter names, in place; collective."""
    local_groups = [group["params"] for group in state["param_groups"]]
    groups_of_stages: list[Any] = [None] * pipeline_group.size()
    dist.all_gather_object(groups_of_stages, local_groups, group=pipeline_group)
    for idx, group in enumerate(state["param_groups"]):
        group["params"] = list(dict.fromkeys(name for groups in groups_of_stages for name in groups[idx]))


def rekey_by_name(
    saved: Mapping[str, Any],
    module: torch.nn.Module,
    optimizer: Optimizer,
    full_model: FullModel,
) -> Mapping[str, Any]:
    """Return a saved state of the full model's optimizer with parameter names as keys instead of indices.

    Assumes that groups list their parameters in the model's order. Collective over the stages if keys are indices.

    Args:
        saved: the state dict of an optimizer; returned unchanged if its keys are names.
        module, optimizer: the module and the optimizer of this rank's stages.
        full_model: the model of all stages.

    Raises:
        ValueError: the saved groups and the optimizer's groups of all stages differ in their numbers of parameters.
    """
    if any(isinstance(key, str) for group in saved["param_groups"] for key in group["params"]):
        return saved
    names = parameter_names(module)
    local_state = {
        "param_groups": [{"params": [names[p] for p in group["params"]]} for group in optimizer.param_groups]
    }
    merge_parameter_groups(local_state, full_model.pipeline_group)
    position = {name: idx for idx, name in enumerate(full_model.parameter_names)}
    groups = [sorted(group["params"], key=position.__getitem__) for group in local_state["param_groups"]]
    saved_groups = saved["param_groups"]
    _check_group_sizes([len(group["params"]) for group in saved_groups], [len(group) for group in groups])
    indices = [idx for group in saved_groups for idx in group["params"]]
    name_of_idx = dict(zip(indices, (name for group in groups for name in group), strict=True))
    return {
        "state": {name_of_idx[idx]: state for idx, state in saved["state"].items()},
        "param_groups": [
            {**group, "params": group_names} for group, group_names in zip(saved_groups, groups, strict=True)
        ],
    }


def _check_group_sizes(saved: list[int], present: list[int]) -> None:
    if saved != present:
        raise ValueError(
            f"the checkpoint's optimizer has parameter groups with {saved} parameters, and this run's optimizer has "
            f"groups with {present}; build the optimizer as in the run that saved the checkpoint."
        )


def named_state(module: torch.nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return the optimizer's state by parameter name, in the format of the module's docstring.

    Collective at zero_stage 1, which gathers the states that it shards.
    """
    from weft.strategy.optimizers.saved_states import states_to_save

    names = parameter_names(module)
    ordered = [p for group in optimizer.param_groups for p in group["params"]]
    state_dict = _gathered_state_dict(optimizer, ordered)
    name_of_idx = {idx: names[parameter] for idx, parameter in enumerate(ordered)}
    named: dict[str, Any] = {
        "state": {name_of_idx[idx]: states_to_save(state, ordered[idx]) for idx, state in state_dict["state"].items()},
        "param_groups": [
            {**group, "params": [name_of_idx[idx] for idx in group["params"]]} for group in state_dict["param_groups"]
        ],
    }
    states = expert_states(module, names)
    return named if states is None else states.split_named(named, optimizer)


def full_state(module: torch.nn.Module, optimizer: Optimizer, keep: bool) -> dict[str, Any]:
    """Return the state with unsharded tensors on the CPU, keyed by index like an unsharded optimizer's `state_dict`.

    Quantized states are converted to float32.

    Collective. Ranks with `keep` false hold no tensors and get {}.
    """
    from weft.strategy.optimizers.saved_states import states_to_save

    ordered = [p for group in optimizer.param_groups for p in group["params"]]
    state_dict = _gathered_state_dict(optimizer, ordered)
    state = {}
    for idx, values in state_dict["state"].items():
        # The order must be the same on every rank: full_tensor is collective.
        in_float32 = states_to_save(values, ordered[idx], in_float32=True)
        full = {name: _full_tensor(value, keep) for name, value in in_float32.items()}
        if keep:
            state[idx] = full
    full_state_dict = {**state_dict, "state": state} if keep else {}
    states = expert_states(module, parameter_names(module)) if keep else None
    return full_state_dict if states is None else states.split_full(full_state_dict, optimizer)


def expert_states(module: torch.nn.Module, names: Mapping[Tensor, str]) -> ExpertStates | None:
    """Return what converts the states of sharded lists of experts; None: the module has none."""
    if "weft.strategy.experts" not in sys.modules:
        return None
    from weft.strategy.optimizers.expert_states import ExpertStates

    return ExpertStates(module, names) or None


def _gathered_state_dict(optimizer: Optimizer, ordered: list[Tensor]) -> dict[str, Any]:
    """Return `optimizer.state_dict()` with states shaped like the parameters; collective at zero_stage 1.

    The states that zero_stage 1 shards are gathered to the CPU one at a time, to save device memory.
    """
    from weft.strategy.data_parallel import sharded_states_of

    state_dict = optimizer.state_dict()
    sharded = sharded_states_of(optimizer)
    if sharded is None:
        return state_dict
    full = {
        idx: {
            name: sharded.gather_full(ordered[idx], v).cpu() if _is_sharded_state(v) else v
            for name, v in values.items()
        }
        for idx, values in state_dict["state"].items()
    }
    return {**state_dict, "state": full}


def _is_sharded_state(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 1


def _full_tensor(value: Any, keep: bool) -> Any:
    from weft.strategy.data_parallel.local import distributed

    if not isinstance(value, Tensor):
        return value
    if isinstance(value, DTensor) and value._local_tensor.device.type != value.device_mesh.device_type:
        # An offloaded state; the mesh's groups may have no backend for the CPU.
        value = distributed(value._local_tensor.to(value.device_mesh.device_type), value, value.shape, value.stride())
    gathered = value.full_tensor() if isinstance(value, DTensor) else value
    return gathered.detach().cpu() if keep else None


def load_state(module: torch.nn.Module, optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Load a state keyed by parameter names or by indices, of full tensors or DTensors placed like the parameters.

    No communication: each rank copies its shard of a full tensor. Loading a checkpoint without state clears the state.

    Raises:
        ValueError: the checkpoint's parameter groups do not fit the optimizer's.
    """
    from weft.strategy.data_parallel.sharded_states import is_elementwise_state, sharded_states_of
    from weft.strategy.optimizers.saved_states import device_of_states, states_to_load

    names = parameter_names(module)
    ordered = [p for group in optimizer.param_groups for p in group["params"]]
    saved_groups = _local_groups(module, names, saved["param_groups"])
    states = expert_states(module, names)
    groups = [group["params"] for group in optimizer.param_groups]
    present = groups if states is None else [states.expanded(group) for group in groups]
    _check_group_sizes([len(group["params"]) for group in saved_groups], [len(group) for group in present])
    if states is not None:
        saved = states.joined(saved, optimizer)
        saved_groups = saved["param_groups"]
    saved_keys = [key for group in saved_groups for key in group["params"]]
    idx_of_name = {names[p]: idx for idx, p in enumerate(ordered)}
    sharded = sharded_states_of(optimizer)
    state = {}
    for position, key in enumerate(saved_keys):
        values = saved.get("state", {}).get(key)
        if values is None:
            continue
        idx = idx_of_name[key] if isinstance(key, str) else position
        state[idx] = {
            name: _shard_like(value, ordered[idx], sharded, device_of_states(optimizer, ordered[idx]))
            if is_elementwise_state(name, value, ordered[idx].shape)
            else value
            for name, value in states_to_load(optimizer, values, ordered[idx]).items()
        }
    first_idx, loaded_groups = 0, []
    for group in saved_groups:
        num_params = len(group["params"])
        loaded_groups.append({**group, "params": list(range(first_idx, first_idx + num_params))})
        first_idx += num_params
    optimizer.load_state_dict({"state": state, "param_groups": loaded_groups})


def _local_groups(
    module: torch.nn.Module, names: Mapping[Tensor, str], groups: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return saved groups without the parameters that only other stages have; `names`: of this rank's parameters."""
    from weft.strategy.pipeline import find_staged

    if find_staged(module) is None:
        return groups
    local_names = set(names.values())
    return [{**group, "params": [key for key in group["params"] if key in local_names]} for group in groups]


def _shard_like(value: Tensor, parameter: Tensor, sharded: ShardedStates | None, device: torch.device) -> Tensor:
    from weft.strategy.data_parallel.local import local_shard, shard_like

    if isinstance(parameter, DTensor) and not isinstance(value, DTensor):
        value = shard_like(value, parameter, device)
    # Cloned, so that the flat shard does not keep the rest of its storage alive.
    return value if sharded is None else sharded.local_flat_shard(parameter, local_shard(value)).clone()


def load_sharded_state(checkpoint: Checkpoint, key: str, module: torch.nn.Module, optimizer: Optimizer) -> None:
    """Load the optimizer saved as `key` in a directory of shards; collective.

    The tensors to read are listed in the directory's metadata; torch would derive them from an optimizer's state, which
    does not exist before its first step.
    """
    from weft.strategy.optimizers.saved_states import device_of_states, empty_state

    metadata = checkpoint.metadata
    names = parameter_names(module)
    parameter_of_name = {name: parameter for parameter, name in names.items()}
    states = expert_states(module, names)
    of_experts = {} if states is None else states.empty_states()
    state: dict[str, dict[str, Any]] = {}
    groups: dict[int, dict[str, Any]] = {}
    for flat_key, entry in metadata.state_dict_metadata.items():
        path = metadata.planner_data[flat_key]  # such as (key, "state", "layer.weight", "exp_avg")
        if path[0] != key or len(path) != 4:
            continue
        _, kind, owner, name = path  # the owner is a parameter's name or a group's index
        # Nothing is read into the others, which are objects.
        tensor = entry if isinstance(entry, TensorStorageMetadata) else None
        if kind == "state" and owner in parameter_of_name:
            parameter = parameter_of_name[owner]
            device = device_of_states(optimizer, parameter)
            state.setdefault(owner, {})[name] = tensor and empty_state(name, tensor, parameter, device)
        elif kind == "state" and owner in of_experts:
            state.setdefault(owner, {})[name] = tensor and of_experts[owner](name, tensor)
        elif kind == "param_groups":
            groups.setdefault(owner, {})[name] = tensor and torch.empty(tensor.size, dtype=tensor.properties.dtype)
    target = {key: {"state": state, "param_groups": [groups[idx] for idx in sorted(groups)]}}
    checkpoint.load(target)
    load_state(module, optimizer, target[key])
