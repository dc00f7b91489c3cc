"""Optimizer states of sharded lists of experts, by the names and in the order of the unsharded experts' parameters.

An optimizer has one state for the stacked parameter of all experts, and an unsharded one has a state for each expert.
Elements are converted by `list_states`; of other values, such as step counts, each expert gets the same, and a stack
gets the largest. Experts that have no state yet, as they never got a token, have zeros.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

from weft.strategy.data_parallel.sharded_states import is_elementwise_state
from weft.strategy.experts.list_modules import StackedExperts
from weft.strategy.experts.list_states import empty_like_split, join, split
from weft.strategy.experts.lists import STACKED

_Member = tuple[Tensor, int | None]  # a parameter, and one of the experts if it is a stack


class ExpertStates:
    """Converts the optimizer states of a module's sharded lists; false if the module has none.

    `names`: of the module's parameters.
    """

    def __init__(self, module: nn.Module, names: Mapping[Tensor, str]) -> None:
        self._names = names
        self._owners: dict[Tensor, StackedExperts] = {}
        self._own_names: dict[Tensor, str] = {}
        for owner in (each for each in module.modules() if isinstance(each, StackedExperts)):
            for name in owner.names:
                self._owners[owner.stack_of(name)] = owner
                self._own_names[owner.stack_of(name)] = name

    def __bool__(self) -> bool:
        return bool(self._owners)

    def expanded(self, parameters: Iterable[Tensor]) -> list[_Member]:
        """Return parameters in the order of an unsharded model, with each stack as the parameters of its experts."""
        members: list[_Member] = []
        for owner, run in itertools.groupby(parameters, key=self._owners.get):
            if owner is None:
                members += [(parameter, None) for parameter in run]
            else:
                stacks = list(run)
                members += [(each, expert) for expert in range(owner._weft_experts.num_experts) for each in stacks]
        return members

    def name_of(self, member: _Member) -> str:
        """Return the name of a parameter in checkpoints."""
        parameter, expert = member
        name = self._names[parameter]
        if expert is None:
            return name
        own_name = self._own_names[parameter]
        return f"{name.removesuffix(f'{STACKED}.{own_name}')}{expert}.{own_name}"

    def split_named(self, state: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
        """Return a state by parameter names, in which stacks are split; collective."""
        found: dict[str, Any] = {}
        for parameter, name in self._names.items():
            if name not in state["state"]:
                continue
            if parameter not in self._owners:
                found[name] = state["state"][name]
                continue
            of_experts = self._split_values(state["state"][name], parameter)
            found.update({self.name_of((parameter, e)): values for e, values in enumerate(of_experts)})
        groups = [
            {**saved, "params": [self.name_of(member) for member in self.expanded(group["params"])]}
            for saved, group in zip(state["param_groups"], optimizer.param_groups, strict=True)
        ]
        return {**state, "state": found, "param_groups": groups}

    def _split_values(self, values: Mapping[str, Any], parameter: Tensor) -> list[dict[str, Any]]:
        owner = self._owners[parameter]
        of_experts: list[dict[str, Any]] = [{} for _ in range(owner._weft_experts.num_experts)]
        for name, value in values.items():
            if is_elementwise_state(name, value, parameter.shape):
                parts: Sequence[Any] = split(value, owner._weft_experts.mesh)
            else:
                parts = [copy.deepcopy(value) for _ in of_experts]
            for of_expert, part in zip(of_experts, parts, strict=True):
                of_expert[name] = part
        return of_experts

    def split_full(self, state: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
        """Return a state of full tensors by indices, in which stacks are split and the indices are unsharded ones."""
        ordered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        values_of = {parameter: state["state"].get(idx) for idx, parameter in enumerate(ordered)}
        found: dict[int, Any] = {}
        groups = []
        indices = itertools.count()
        for saved, group in zip(state["param_groups"], optimizer.param_groups, strict=True):
            own = []
            for parameter, expert in self.expanded(group["params"]):
                own.append(next(indices))
                values = values_of[parameter]
                if values is not None:
                    found[own[-1]] = values if expert is None else _values_of(expert, values, parameter)
            groups.append({**saved, "params": own})
        return {**state, "state": found, "param_groups": groups}

    def joined(self, saved: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
        """Return a saved state by parameter names, in which the states of experts are joined to those of stacks.

        Collective if states are DTensors. The groups of `saved` list as many parameters as those of an unsharded
        model.
        """
        found: dict[str, Any] = {}
        groups = []
        for saved_group, group in zip(saved["param_groups"], optimizer.param_groups, strict=True):
            keys = saved_group["params"]
            members = self.expanded(group["params"])
            by_name = any(isinstance(key, str) for key in keys)
            of_parameter: dict[Tensor, list[Any]] = {}
            for member, key in zip(members, keys, strict=True):
                values = saved.get("state", {}).get(self.name_of(member) if by_name else key)
                of_parameter.setdefault(member[0], []).append(values)
            for parameter, values in of_parameter.items():
                if any(each is not None for each in values):
                    is_stack = parameter in self._owners
                    found[self._names[parameter]] = self._join_values(values, parameter) if is_stack else values[0]
            groups.append({**saved_group, "params": [self._names[parameter] for parameter in group["params"]]})
        return {**saved, "state": found, "param_groups": groups}

    def _join_values(self, of_experts: Sequence[Mapping[str, Any] | None], parameter: Tensor) -> dict[str, Any]:
        mesh = self._owners[parameter]._weft_experts.mesh
        present = [values for values in of_experts if values is not None]
        joined: dict[str, Any] = {}
        for name, example in present[0].items():
            if is_elementwise_state(name, example, parameter.shape[1:]):
                values = [torch.zeros_like(example) if each is None else each[name] for each in of_experts]
                joined[name] = join(values, parameter, mesh)
            else:
                joined[name] = max((each[name] for each in present), key=_as_number)
        return joined

    def members(self) -> dict[str, _Member]:
        """Return the stack and the expert of each name of an expert's parameter."""
        found = [member for stack in self._owners for member in self.expanded([stack])]
        return {self.name_of(member): member for member in found}

    def empty_states(self) -> dict[str, Any]:
        """Return, by the name of each expert's parameter, a function that makes a tensor for one of its saved states.

        It gets the name of the state and the description of the saved tensor.
        """
        return {name: self._maker(stack) for name, (stack, _) in self.members().items()}

    def _maker(self, parameter: Tensor) -> Any:
        mesh = self._owners[parameter]._weft_experts.mesh
        shape = parameter.shape[1:]

        def make(name: str, saved: TensorStorageMetadata) -> Tensor:
            if saved.size == shape and (shape or name != "step"):
                return empty_like_split(shape, saved.properties.dtype, mesh, torch.device(mesh.device_type))
            return torch.empty(saved.size, dtype=saved.properties.dtype)

        return make


def _values_of(expert: int, values: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
    """Return an expert's values of full ones of a stack; copies, as an optimizer changes a step count in place."""
    return {
        name: value[expert].clone() if is_elementwise_state(name, value, parameter.shape) else copy.deepcopy(value)
        for name, value in values.items()
    }


def _as_number(value: Any) -> float:
    is_number = isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)
    return float(value) if is_number else 0.0
