"""Finds the experts and routers that compute on a shard of the sequence, for plans with sequence_parallel.

A router chooses experts for this rank's tokens, which are dispatched without a gather of the sequence. The gradient of
the router, which is replicated, is then summed over the tensor-parallel ranks, like that of a norm.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import nn

from weft.strategy.experts.layer import state_of_experts
from weft.strategy.experts.lists import find_expert_lists
from weft.strategy.experts.recognition import find_experts, layout_of, num_experts_of
from weft.strategy.recognition.assignments import Assignment, parent_name


def check_experts(model: nn.Module, block: str, group_name: str) -> None:
    """Raise ValueError for experts in a block that cannot get a shard of the tokens.

    `group_name`: the tensor-parallel ranks.
    """
    name = next(iter(find_expert_lists(model.get_submodule(block))), None)
    if name is not None:
        raise ValueError(
            f"sequence_parallel=True: got the list of experts '{block}.{name}', whose calls need all tokens, but each "
            "rank would have only a shard of them; use experts in one module, as in transformers 5, or leave sequence "
            "parallelism out."
        )
    for name in find_experts(model.get_submodule(block)):
        state = state_of_experts(model.get_submodule(f"{block}.{name}"))
        if state is not None and state.tensor_group != group_name:
            raise ValueError(
                f"sequence_parallel=True: got the experts '{block}.{name}' on an axis without the tensor-parallel "
                "ranks, which would have different tokens for the same experts; pass an axis that includes these ranks "
                "and tensor_mesh to parallelize_experts."
            )


def sharded_experts(model: nn.Module, styles: Mapping[str, Assignment], parent: str) -> set[str]:
    """Return the names of the modules with sharded experts that are inside another module."""
    names = [f"{parent}.{name}" for name in find_experts(model.get_submodule(parent)) if name]
    return {
        name
        for name in names
        if styles.get(name, Assignment("")).style == "experts"
        or state_of_experts(model.get_submodule(name)) is not None
    }


def routers_of(model: nn.Module, experts: Collection[str]) -> set[str]:
    """Return the names of the routers beside modules with experts: all of their parameters have a row per expert."""
    routers = set()
    for name in experts:
        module, parent = model.get_submodule(name), parent_name(name)
        layout = layout_of(module)
        assert layout is not None
        num_experts = num_experts_of(module, layout)
        for key, other in model.get_submodule(parent).named_children():
            parameters = list(other.parameters())
            if other is not module and parameters and all(p.shape[:1] == (num_experts,) for p in parameters):
                routers.add(f"{parent}.{key}")
    return routers
