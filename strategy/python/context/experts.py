"""Lets modules with experts compute with the shards of sequences: they treat each token by itself."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from weft.strategy.context.sharded_sequence import ShardedSequence, separate
from weft.strategy.experts.recognition import layout_of
from weft.strategy.sharding.state import cached


class _OnShards:
    """Marks the classes of modules whose forward gets and returns shards."""


def compute_experts_on_shards(model: nn.Module) -> None:
    """Make the modules of a model that hold experts compute with shards, in place; other arguments change nothing."""
    for module in model.modules():
        if layout_of(module) is not None and not isinstance(module, _OnShards):
            module.__class__ = _class_on_shards(type(module))


@cached
def _class_on_shards(cls: type[nn.Module]) -> type[nn.Module]:
    own_forward = cls.forward

    @functools.wraps(own_forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        tokens = args[0] if args else kwargs.get("hidden_states")
        if torch.compiler.is_compiling() or not isinstance(tokens, ShardedSequence):
            return own_forward(self, *args, **kwargs)
        (args, kwargs), _ = separate((args, kwargs))
        return ShardedSequence(own_forward(self, *args, **kwargs), tokens.place)

    return type(cls.__name__, (_OnShards, cls), {"__module__": cls.__module__, "forward": forward})
