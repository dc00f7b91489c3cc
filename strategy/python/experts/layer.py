"""The forward of a module with experts, of which each rank of a group holds a shard.

A gradient of an expert's parameter is the sum over the tokens that all ranks of the expert-parallel group have sent. A
gradient of any other parameter is that of this rank's tokens alone, and is averaged over all ranks with data: also over
those of the expert-parallel group. To give both the same scale, the gradients of the rows are divided by the number of
ranks where the backward reaches the experts, and multiplied again where it leaves them. An average over the ranks that
hold the same experts remains to be computed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from weft.strategy.experts.halves import exchange_in_halves, weights_for
from weft.strategy.experts.halves_choice import computes_in_halves
from weft.strategy.experts.recognition import ExpertsLayout
from weft.strategy.sharding.local_tensor import local_of
from weft.strategy.sharding.state import cached, state_of

_KEY = "_weft_experts"


@dataclasses.dataclass(frozen=True)
class ExpertsState:
    """The state of a module with experts; immutable.

    layout: None: the experts are the modules of a list (`list_modules.StackedExperts`).
    mesh: the mesh of its parameters, of one axis.
    expert_group: the c10d name of the group over whose ranks the experts are sharded.
    tensor_group: the ranks of it that have the same tokens, of which each sends its part; "": all have different ones.
    num_data: the ranks of it that have different data; shards of one sequence are the same data.
    """

    original_class: type[nn.Module]
    layout: ExpertsLayout | None
    mesh: DeviceMesh
    expert_group: str
    tensor_group: str
    num_data: int
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


def experts_forward(
    module: Any,
    state: ExpertsState,
    parameter: Callable[[str], Tensor | None],
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """Return the weighted sum `[..., h]` of the experts' results for tokens `[..., h]`; ids, weights: `[..., k]`.

    `parameter`: returns this rank's shard of a parameter by its name.
    """
    assert state.layout is not None
    layout = state.layout

    def run(in_halves: bool) -> None:
        """Compute forward and backward of copies without a history; keep nothing."""
        leaves: dict[str, Tensor] = {}

        def leaf(name: str) -> Tensor | None:
            value = parameter(name)
            if value is not None and name not in leaves:
                leaves[name] = value.detach().requires_grad_(value.requires_grad)
            return leaves.get(name)

        x, weights = (each.detach().requires_grad_(each.requires_grad) for each in (hidden_states, top_k_weights))
        compute = functools.partial(_compute, module, layout, leaf)
        result = exchange_rows(state, compute, x, top_k_index, weights, in_halves=in_halves)
        inputs = [each for each in (x, weights, *leaves.values()) if each.requires_grad]
        if inputs:
            torch.autograd.grad(result, inputs, torch.ones_like(result))

    kind = (state.expert_group, state.original_class, state.num_experts, hidden_states.size(-1), hidden_states.dtype)
    in_halves = computes_in_halves(kind, state.expert_group, hidden_states, run)
    compute = functools.partial(_compute, module, layout, parameter)
    return exchange_rows(state, compute, hidden_states, top_k_index, top_k_weights, in_halves=in_halves)


def exchange_rows(
    state: ExpertsState,
    compute: Callable[[Tensor, Tensor], Tensor],
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    in_halves: bool = False,
) -> Tensor:
    """Return what `experts_forward` does, with the results of `compute`.

    `compute`: returns the results `[m, h]` of this rank's experts for rows `[m, h]`, sorted by expert, and the number
    of rows of each expert. `in_halves`: see `weft.strategy.experts.halves`.
    """

    def scaled(rows: Tensor, counts: Tensor) -> Tensor:
        if state.num_data == 1:
            return compute(rows, counts)
        results = compute(_ScaledGradient.apply(rows, float(state.num_data)), counts)
        return _ScaledGradient.apply(results, 1.0 / state.num_data)  # type: ignore[no-any-return]

    inputs = [each.flatten(0, -2) for each in (hidden_states, top_k_index, top_k_weights)]
    num_tokens = inputs[0].size(0)
    if state.tensor_group:
        inputs = [torch.ops.weft.scatter_to_group(each, 0, state.tensor_group) for each in inputs]
    if in_halves:
        combined = exchange_in_halves(scaled, *inputs, num_experts=state.num_experts, group_name=state.expert_group)
    else:
        tokens, expert_ids, weights = inputs
        rows, counts, *routes = torch.ops.weft.moe_dispatch(
            tokens, expert_ids, num_experts=state.num_experts, group_name=state.expert_group
        )
        results = scaled(rows, counts)
        weights = weights_for(results, weights)
        combined = torch.ops.weft.moe_combine(results, weights, *routes, group_name=state.expert_group)
    if state.tensor_group:
        combined = torch.ops.weft.gather_from_group(combined, 0, state.tensor_group, dim_size=num_tokens)
    result: Tensor = combined.to(hidden_states.dtype)
    # FSDP2 warns of a result that is a view.
    return result if hidden_states.dim() == 2 else result.view(hidden_states.shape)


def _compute(
    module: Any, layout: ExpertsLayout, parameter: Callable[[str], Tensor | None], rows: Tensor, counts: Tensor
) -> Tensor:
    """Return the results `[m, h]` of this rank's experts for their rows `[m, h]`."""
    up, down = parameter(layout.up), parameter(layout.down)
    assert up is not None and down is not None
    if layout.is_transposed:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    up_bias = None if layout.up_bias is None else parameter(layout.up_bias)
    down_bias = None if layout.down_bias is None else parameter(layout.down_bias)
    hidden = torch.ops.weft.grouped_linear(rows, up, counts, up_bias)
    hidden = module._apply_gate(hidden) if layout.has_gate else module.act_fn(hidden)
    results: Tensor = torch.ops.weft.grouped_linear(hidden, down, counts, down_bias)
    return results


def _experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    def parameter(name: str) -> Tensor:
        return local_of(self._parameters[name])

    return experts_forward(self, self._weft_experts, parameter, hidden_states, top_k_index, top_k_weights)


@cached
def _sharded_class(cls: type[nn.Module]) -> type[nn.Module]:
    namespace: dict[str, Any] = {"__module__": cls.__module__}
    namespace["forward"] = functools.wraps(cls.forward)(_experts_forward)
    return type(f"Weft{cls.__name__}", (ShardedExperts, cls), namespace)


def state_of_experts(module: nn.Module) -> ExpertsState | None:
    """Return the state of a module whose experts are sharded; None for any other module."""
    return module.__dict__.get(_KEY)


def has_own_tokens(module: nn.Module) -> bool:
    """Return whether each rank over which a module's experts are sharded routes tokens of its own."""
    parallel = state_of(module)
    state = state_of_experts(module) or (None if parallel is None else parallel.experts)
    return state is not None and not state.tensor_group


def route_own_tokens(module: nn.Module) -> None:
    """Let the ranks of a tensor-parallel group, whose experts are sharded, have shards of a sequence."""
    state = state_of_experts(module)
    if state is not None:
        set_state_of_experts(module, dataclasses.replace(state, tensor_group=""))


def set_state_of_experts(module: nn.Module, state: ExpertsState) -> None:
    """Give a module the forward of sharded experts."""
    module.__dict__[_KEY] = state
    module.__class__ = _sharded_class(state.original_class)
