"""The forward of a module with experts, of which each rank of a group holds a shard.

A gradient of an expert's parameter is the sum over the tokens that all ranks of the expert-parallel group have sent. A
gradient of any other parameter is that of this rank's tokens alone, and is averaged over all ranks with data: also over
those of the expert-parallel group. To give both the same scale, the gradients of the rows are divided by the number of
ranks where the backward reaches the experts, and multiplied again where it leaves them. What remains is an average over
the ranks that hold the same experts.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from weft.strategy.experts.recognition import ExpertsLayout
from weft.strategy.sharding.local_tensor import local_of
from weft.strategy.sharding.state import cached

_KEY = "_weft_experts"


@dataclasses.dataclass(frozen=True)
class ExpertsState:
    """The state of a module with experts; immutable.

    mesh: the mesh of its parameters.
    expert_group: the c10d name of its group along expert_parallel, of num_ranks ranks.
    """

    original_class: type[nn.Module]
    layout: ExpertsLayout
    mesh: DeviceMesh
    expert_group: str
    num_ranks: int
    num_experts: int

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertsState:
        return self  # immutable, and the mesh must stay the same mesh


class ShardedExperts:
    """Marks the modules whose experts `parallelize_experts` has sharded."""

    _weft_experts: ExpertsState


class _ScaledGradient(torch.autograd.Function):
    """x itself; its gradient is multiplied by a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


def _experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Return the weighted sum `[..., h]` of the experts' results for tokens `[..., h]`; ids, weights: `[..., k]`."""
    state: ExpertsState = self._weft_experts
    shape = hidden_states.shape
    hidden_states, top_k_index, top_k_weights = (
        each.flatten(0, -2) for each in (hidden_states, top_k_index, top_k_weights)
    )
    layout = state.layout
    up, down, up_bias, down_bias = (
        None if name is None else local_of(self._parameters[name])
        for name in (layout.up, layout.down, layout.up_bias, layout.down_bias)
    )
    assert up is not None and down is not None
    if layout.is_transposed:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    group_name = state.expert_group
    rows, counts, *routes = torch.ops.weft.moe_dispatch(
        hidden_states, top_k_index, num_experts=state.num_experts, group_name=group_name
    )
    rows = _ScaledGradient.apply(rows, float(state.num_ranks))
    hidden = torch.ops.weft.grouped_linear(rows, up, counts, up_bias)
    hidden = self._apply_gate(hidden) if layout.has_gate else self.act_fn(hidden)
    results = torch.ops.weft.grouped_linear(hidden, down, counts, down_bias)
    results = _ScaledGradient.apply(results, 1.0 / state.num_ranks)
    weights = top_k_weights
    if weights.dtype not in (results.dtype, torch.float32) or results.dtype == torch.float64:
        weights = weights.to(results.dtype)
    combined: Tensor = torch.ops.weft.moe_combine(results, weights, *routes, group_name=group_name)
    return combined.to(hidden_states.dtype).view(shape)


@cached
def _sharded_class(cls: type[nn.Module]) -> type[nn.Module]:
    namespace: dict[str, Any] = {"__module__": cls.__module__}
    namespace["forward"] = functools.wraps(cls.forward)(_experts_forward)
    return type(f"Weft{cls.__name__}", (ShardedExperts, cls), namespace)


def state_of_experts(module: nn.Module) -> ExpertsState | None:
    """Return the state of a module whose experts are sharded; None for any other module."""
    return module.__dict__.get(_KEY)


def set_state_of_experts(module: nn.Module, state: ExpertsState) -> None:
    """Give a module the forward of sharded experts."""
    module.__dict__[_KEY] = state
    module.__class__ = _sharded_class(state.original_class)
