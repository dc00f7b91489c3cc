"""Balanced routing, which dry runs assume: all experts of a layer are chosen equally often.

Which experts a token gets depends on values, which a dry run does not have. weft's operators assume in a dry run that
each rank has as many tokens as this one, and that all experts get equally many of them (`balanced_counts` in
ops/src/expert_rows.cpp). Experts that are not sharded are computed by the model's own code, such as the loop over
experts of Hugging Face's "eager" implementation: `balance_choices` gives it choices with values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._mode_utils import no_dispatch

from weft.strategy.dry_run.counting_mode import CountingMode
from weft.strategy.experts.layer import state_of_experts
from weft.strategy.experts.recognition import find_experts, num_experts_of
from weft.strategy.sharding.state import state_of


def balance_choices(model: nn.Module, counting: CountingMode) -> None:
    """Replace, in calls of modules with experts that are not sharded, the choices of experts, in place.

    The shapes are those of the router's choices. The values, and those that the module computes from them, exist.
    """
    for name, layout in find_experts(model).items():
        module = model.get_submodule(name)
        state = state_of(module)
        if state_of_experts(module) is None and (state is None or state.experts is None):
            module.__dict__["forward"] = _balanced(module.forward, num_experts_of(module, layout), counting)


def _balanced(forward: Callable[..., Any], num_experts: int, counting: CountingMode) -> Callable[..., Any]:
    def balanced_forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
        with no_dispatch():
            choices = balanced_choices(top_k_index.shape, num_experts, top_k_index.dtype)
        counting.ledger.leave_out(choices)  # it stands for the router's choices, which are in the ledger
        with counting.keeping_integers():
            return forward(hidden_states, choices, top_k_weights)

    return balanced_forward


def balanced_choices(shape: torch.Size, num_experts: int, dtype: torch.dtype) -> Tensor:
    """Return ids of experts for tokens, [..., k]: all are chosen equally often, the first ones up to once more.

    A token has different experts, if there are at least k.
    """
    return torch.arange(shape.numel()).remainder(num_experts).view(shape).to(dtype)
