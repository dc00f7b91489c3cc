"""Stands for experts where a model runs without values: which tokens an expert gets depends on values."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from weft.strategy.experts.recognition import layout_of
from weft.strategy.sharding.state import cached


def combine_without_experts(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Return a tensor like the experts' result for tokens `[..., h]`, which depends on the tokens and the weights."""
    return hidden_states * top_k_weights.sum(-1, keepdim=True).to(hidden_states.dtype)


def _forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    return combine_without_experts(hidden_states, top_k_index, top_k_weights)


@cached
def _class_without_experts(cls: type[nn.Module]) -> type[nn.Module]:
    return type(cls.__name__, (cls,), {"__module__": cls.__module__, "forward": _forward})


def leave_out_experts(model: nn.Module) -> None:
    """Make the modules of a model that hold experts return `combine_without_experts`, in place."""
    for module in model.modules():
        if layout_of(module) is not None:
            module.__class__ = _class_without_experts(type(module))
