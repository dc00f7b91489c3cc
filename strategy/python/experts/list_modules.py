"""The modules that take the places of a list of experts, whose ranks each hold some of them.

A sharded list has the same length and items as before: each item is an `ExpertCall`, which passes calls to the forward
around it (`list_forward`). Its only child module is `stacked`, a `StackedExperts` with the parameters of all experts:
the parameter `w1.weight` of the experts is one DTensor `stacked.w1.weight` `[experts, ...]`, sharded along dim 0, as in
models whose experts are one module. The experts' own modules, without parameters, are attributes that
`named_modules` does not list.

State dicts of a list have the names and shapes of the unsharded experts, see `list_states`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from weft.strategy.experts.layer import ExpertsState, ShardedExperts, exchange_rows
from weft.strategy.experts.list_states import join_entries, split_entries
from weft.strategy.experts.lists import STACKED, ExpertList, parameters_of, slots_of
from weft.strategy.sharding.local_tensor import local_of
from weft.strategy.sharding.state import cached


class Calls:
    """Records the calls of a list's experts ("record"), or answers them with results ("answer"), by `mode`.

    inputs: (expert, tensor) of each call, in the order of the calls.
    """

    def __init__(self) -> None:
        self.mode = ""
        self.inputs: list[tuple[int, Tensor]] = []
        self.results: list[Tensor] = []
        self.num_answered = 0
        self.is_verified = False  # a forward has called the experts with the recorded tensors

    def begin(self, mode: str) -> None:
        self.mode, self.num_answered = mode, 0

    def check_all_answered(self) -> None:
        """Raise RuntimeError unless the second pass has made all calls of the first one."""
        if self.num_answered != len(self.inputs):
            raise RuntimeError(
                f"the second pass of a forward made {self.num_answered} calls of a sharded list's experts, and the "
                f"first one {len(self.inputs)}; expected are calls that depend on the arguments alone: leave expert "
                "parallelism out for this model."
            )
        self.is_verified = self.is_verified or bool(self.inputs)

    def end(self) -> None:
        self.mode, self.inputs, self.results = "", [], []

    def call(self, expert: int, tensor: Tensor) -> Tensor:
        """Return the expert's results for a tensor `[..., h]`; zeros while calls are recorded."""
        if self.mode == "record":
            self.inputs.append((expert, tensor))
            return torch.zeros_like(tensor, requires_grad=False)
        if self.mode != "answer":
            raise RuntimeError(
                f"expert {expert} of a sharded list was called outside of the forward of the module that holds the "
                "list; call that module, or leave expert parallelism out."
            )
        position, self.num_answered = self.num_answered, self.num_answered + 1
        if position >= len(self.inputs) or not self._is_recorded(position, expert, tensor):
            raise RuntimeError(
                f"call {position} of a sharded list's experts, of expert {expert} with {list(tensor.shape)}, is not "
                "the call that the first pass of the forward has made; expected are experts whose inputs do not depend "
                "on results of other experts: leave expert parallelism out for this model."
            )
        return self.results[position]

    def _is_recorded(self, position: int, expert: int, tensor: Tensor) -> bool:
        recorded, before = self.inputs[position]
        if recorded != expert or before.shape != tensor.shape:
            return False
        return self.is_verified or torch.equal(before.detach(), tensor.detach())


class ExpertCall(nn.Module):
    """An item of a sharded list. Attributes are those of the expert's own module, whose parameters are None."""

    def __init__(self, expert: nn.Module, idx: int, calls: Calls) -> None:
        super().__init__()
        # Not by setattr, which would register the expert as a child module.
        self.__dict__.update(_weft_expert=expert, _weft_idx=idx, _weft_calls=calls)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_weft_expert"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        values = (*args, *kwargs.values())
        if len(values) != 1 or not isinstance(values[0], Tensor) or values[0].dim() == 0:
            raise TypeError(
                f"expert {self._weft_idx} of a sharded list got {len(values)} arguments; pass one tensor [..., h], and "
                "multiply by weights outside of the experts."
            )
        result: Tensor = self._weft_calls.call(self._weft_idx, values[0])
        return result

    def extra_repr(self) -> str:
        return f"expert {self._weft_idx}, a {type(self._weft_expert).__name__}"


class StackedExperts(ShardedExperts, nn.Module):
    """Has the stacked parameters of a list's experts; computes with this rank's experts.

    Its modules have the names of those of an expert, and only hold parameters.
    """

    def __init__(self, state: ExpertsState, experts: list[nn.Module], own: range) -> None:
        super().__init__()
        self._weft_experts = state
        self.own_experts = experts[own.start : own.stop]
        self.slots = [list(slots_of(expert)) for expert in self.own_experts]
        self.names = list(parameters_of(experts[0]))

    def set_parameter(self, name: str, parameter: nn.Parameter) -> None:
        """Register a stacked parameter by its name in an expert."""
        module: nn.Module = self
        *path, own_name = name.split(".")
        for each in path:
            if each not in module._modules:
                module._modules[each] = nn.Module()
            inner = module._modules[each]
            assert inner is not None
            module = inner
        module._parameters[own_name] = parameter

    def stack_of(self, name: str) -> nn.Parameter:
        """Return the stacked parameter `[experts, ...]` of a name in an expert."""
        *path, own_name = name.split(".")
        module: Any = self
        for each in path:
            module = module._modules[each]
        stack: nn.Parameter = module._parameters[own_name]
        return stack

    def forward(self, rows: Tensor, expert_ids: Tensor) -> Tensor:
        """Return the results `[n, h]` of the experts `[n]` of rows `[n, h]`; collective."""
        ones = torch.ones_like(rows[:, :1], requires_grad=False)
        return exchange_rows(self._weft_experts, self._compute, rows, expert_ids.unsqueeze(-1), ones)

    def _compute(self, rows: Tensor, counts: Tensor) -> Tensor:
        stacks = [local_of(self.stack_of(name)).unbind(0) for name in self.names]
        # Not views, so that experts may change them in place. Experts without rows compute, too: the backward then
        # reaches the parameters on each rank.
        segments = torch.unsafe_split_with_sizes(rows, counts.tolist(), 0)
        results = []
        for expert, slots, segment, *values in zip(self.own_experts, self.slots, segments, *stacks, strict=True):
            if expert.training is not self.training:
                expert.train(self.training)
            result = _called(expert, slots, values, segment)
            if result.shape != segment.shape:
                raise RuntimeError(
                    f"an expert, a {type(expert).__name__}, returned {list(result.shape)} for {list(segment.shape)}; "
                    "expected are experts with results of the shape of their input: leave expert parallelism out."
                )
            results.append(result)
        return torch.cat(results)


def _called(expert: nn.Module, slots: list[tuple[nn.Module, str]], values: list[Tensor], rows: Tensor) -> Tensor:
    """Return the result of an expert's own module with these values as parameters."""
    for (module, name), value in zip(slots, values, strict=True):
        module._parameters[name] = value  # type: ignore[assignment]
    try:
        result: Tensor = expert(rows)
    finally:
        for module, name in slots:
            module._parameters[name] = None
    return result


class _ShardedList(ExpertList):
    """The list; its class is a subclass of the user's, too."""

    def __len__(self) -> int:
        return len(self.__dict__["_weft_items"])

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.__dict__["_weft_items"])

    def __getitem__(self, idx: Any) -> Any:
        items = self.__dict__["_weft_items"]
        return nn.ModuleList(items[idx]) if isinstance(idx, slice) else items[operator.index(idx)]

    def __getattr__(self, name: str) -> Any:
        # torch.distributed.checkpoint follows the names of a state dict from module to module.
        items = self.__dict__.get("_weft_items", ())
        return items[int(name)] if name.isdecimal() and int(name) < len(items) else super().__getattr__(name)

    def state_dict(self, *args: Any, prefix: str = "", **kwargs: Any) -> Any:
        entries = super().state_dict(*args, prefix=prefix, **kwargs)
        return split_entries(entries, f"{prefix}{STACKED}.", prefix, self.stacked)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        join_entries(state_dict, f"{prefix}{STACKED}.", prefix, self.stacked)
        super()._load_from_state_dict(state_dict, prefix, *args)


@cached
def sharded_list_class(cls: type[nn.ModuleList]) -> type[nn.ModuleList]:
    """Return the class of a sharded list whose own class is `cls`."""
    return type(f"Weft{cls.__name__}", (_ShardedList, cls), {"__module__": cls.__module__})
