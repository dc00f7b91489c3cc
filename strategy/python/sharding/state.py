"""The state that a parallelized module stores."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from weft.strategy.sharding.scopes import Scope
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
    def column_layers(self) -> tuple[str, ...]:
        """Return the names of the layers that are sharded by column."""
        return (self.up,) if self.gate is None else (self.gate, self.up)

    @property
    def children(self) -> tuple[str, ...]:
        """Return the names of all layers, the row layer last."""
        return (*self.column_layers, self.down)


@dataclasses.dataclass(frozen=True)
class ModuleState:
    """The state of one module; immutable.

    `style`: one of weft.strategy.STYLES; "gather_weights", which only plan="auto" gives; "" for a module without style.
    """

    original_class: type[nn.Module]
    style: str
    mesh: DeviceMesh
    group_name: str
    name: str = ""  # the name in the model that parallelize was called with
    is_root: bool = False  # parallelize was called with it; its forward explains errors that sharded modules raise
    rule: str = ""  # the pattern that gave the style, or "auto"
    note: str = ""
    mlp: MlpLayers | None = None  # the layers of a fused MLP
    activation: str = ""  # of a fused MLP
    recompute: bool = False  # a fused MLP saves only its input for the backward
    watched: tuple[Any, ...] = ()  # `attribute_reads.Watched`: a fused MLP raises if one of these attributes changed
    child_classes: tuple[type, ...] = ()  # of a fused MLP's layers, in the order of `mlp.children`
    transposed: bool = False  # the weight is [in, out], as in GPT-2's Conv1D
    vocab_start: int = 0  # for a vocab_embedding or vocab_head: the first row on this rank
    is_layer_of_fused: bool = False  # it is a layer of a fused MLP
    sequence_role: SequenceRole | None = None  # its role if activations are sharded along the sequence
    inner_role: SequenceRole | None = None  # of a compiled block: its role inside of the compiled code, if that differs
    precision: torch.dtype | None = None  # the dtype that it computes in; None: no rule names one
    local_attributes: tuple[tuple[str, int], ...] = ()  # (name, value on this rank in the forward), as for head counts
    dropout_inputs: tuple[ShardedDim, ...] = ()  # for an nn.Dropout between column and row layers: sharded dim by input
    experts: Any = None  # `ExpertsState` of a module with the style experts
    scope: Scope | None = None  # of a column or row layer: outside of this forward, its activations are full
    own_scope: Scope | None = None  # of the smallest module that contains a group of such layers: its forward
    plan_key: Any = None  # on the root: `key()` of the applied plan, by which another plan is detected
    plan_notes: tuple[str, ...] = ()  # on the root: the notes of the report

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleState:
        return self  # immutable, and the mesh must stay the same mesh


def state_of(module: nn.Module) -> ModuleState | None:
    return module.__dict__.get(_KEY)


def set_state(module: nn.Module, state: ModuleState) -> None:
    module.__dict__[_KEY] = state


def remove_state(module: nn.Module) -> None:
    module.__dict__.pop(_KEY, None)


def with_local_attributes(own_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward that runs `own_forward` with the module's attributes set to its state's `local_attributes`."""

    @functools.wraps(own_forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return with_values(self, self._weft_state.local_attributes, own_forward, (self, *args), kwargs)

    return forward


def with_values(
    module: nn.Module,
    values: Iterable[tuple[str, int]],
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """Return `function(*args, **kwargs)`; during the call a module's attributes are set to `values`, (name, value)."""
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
    """Return `functools.cache(function)`, cast because type checkers do not accept module classes as hashable."""
    return cast("_Function", functools.cache(function))


def original_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that the module had before parallelize; its class if it was not parallelized."""
    state = state_of(module)
    return type(module) if state is None else state.original_class
