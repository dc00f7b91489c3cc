"""The state that a parallelized module stores."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from weft.strategy.sharding.sequence_region import SequenceRole
from weft.strategy.sharding.shard_dropout import ShardedDim

_KEY = "_weft_state"
_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True)
class MlpLayers:
    """The names of an MLP's layers among a container's children; `gate` is None for an ungated MLP."""

    gate: str | None
    up: str
    down: str

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.up,) if self.gate is None else (self.gate, self.up)

    @property
    def children(self) -> tuple[str, ...]:
        return (*self.columns, self.down)


@dataclasses.dataclass(frozen=True)
class ModuleState:
    """`style` is one of weft.strategy.STYLES, or "" for a module that no rule named."""

    original_class: type[nn.Module]
    style: str
    mesh: DeviceMesh
    group_name: str
    name: str = ""  # the name in the model that parallelize was called with
    explains: bool = False  # whether it is that model: its forward explains errors of sharded modules
    rule: str = ""  # the pattern that gave the style, or "auto"
    note: str = ""
    mlp: MlpLayers | None = None  # of a fused container, with its activation
    activation: str = ""
    recompute: bool = False  # a fused container saves only its input for the backward
    child_classes: tuple[type, ...] = ()
    transposed: bool = False  # the weight is [in, out], as in GPT-2's Conv1D
    vocab_start: int = 0  # for a vocab_embedding or vocab_head: the first row on this rank
    fused: bool = False  # a layer of a fused container
    sequence: SequenceRole | None = None  # its role if activations are sharded along the sequence
    precision: torch.dtype | None = None  # the dtype that it computes in; None: that of the modules around it
    counts: tuple[tuple[str, int], ...] = ()  # attributes and their values on this rank, while the forward runs
    dropouts: tuple[ShardedDim, ...] = ()  # for an nn.Dropout between column and row layers
    plan_key: Any = None  # set on the module that parallelize was called with
    plan_notes: tuple[str, ...] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleState:
        return self  # immutable, and the mesh must stay the same mesh


def state_of(module: nn.Module) -> ModuleState | None:
    return module.__dict__.get(_KEY)


def set_state(module: nn.Module, state: ModuleState) -> None:
    module.__dict__[_KEY] = state


def remove_state(module: nn.Module) -> None:
    module.__dict__.pop(_KEY, None)


def with_local_counts(own_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward during which a module's attributes have the values of its state's `counts`."""

    @functools.wraps(own_forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        counts = self._weft_state.counts
        return with_values(self, counts, own_forward, (self, *args), kwargs)

    return forward


def with_values(
    module: nn.Module,
    values: Iterable[tuple[str, int]],
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """Return `function(*args, **kwargs)`; during the call attributes of a module have these values."""
    before = [(name, getattr(module, name)) for name, _ in values]
    for name, value in values:
        setattr(module, name, value)
    try:
        return function(*args, **kwargs)
    finally:
        for name, value in before:
            setattr(module, name, value)


def child_of(module: nn.Module, name: str) -> nn.Module:
    """Return the child that is registered under a name."""
    child = module._modules[name]
    assert child is not None
    return child


def cached(function: _Function) -> _Function:
    """Return `functools.cache` of a function of module classes, which type checkers do not accept as hashable."""
    return cast("_Function", functools.cache(function))


def original_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that the module had before parallelize; its class if it was not parallelized."""
    state = state_of(module)
    return type(module) if state is None else state.original_class
