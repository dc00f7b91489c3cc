"""Measures the cost of a model's layers and chooses the cuts that balance it, for pipelines with cuts="auto"."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from weft.strategy._plan import Partition, partition
from weft.strategy.pipeline.profile import FLOPS, LayerProfile, layer_names, profile_layers
from weft.strategy.pipeline.random_streams import preserving_all_random_states
from weft.strategy.pipeline.stages import ANY_STAGE, find_layers

_PARAMETERS = "parameters without embeddings"


@dataclasses.dataclass(frozen=True)
class Choice:
    """Chosen cuts, and a sentence about them for the log.

    layer_stages: the stages of the layers that call order puts into other stages than registration order.
    """

    cuts: tuple[str, ...]
    layer_stages: Mapping[str, int]
    text: str


def candidates(model: nn.Module) -> list[str]:
    """Return the names at which stages may begin: layers with parameters, in the order of registration."""
    return [name for name in layer_names(model) if any(True for _ in model.get_submodule(name).parameters())]


def choose_cuts(
    model: nn.Module,
    num_stages: int,
    *,
    forward: Callable[[], Any] | None = None,
    forward_may_fail: bool = False,
    in_flight: Sequence[int] = (),
    state_factor: float = 4.0,
    memory_limit: int | None = None,
    limit_may_fail: bool = False,
) -> Choice:
    """Choose the cuts that minimise the cost of the slowest stage within a memory limit; does not communicate.

    Args:
        model: full, with or without values.
        num_stages: the number of stages.
        forward: calls the model once, as for a micro-batch, and returns its outputs; it runs on fake tensors, and the
            cuts balance its floating-point operations. None: they balance parameters, except those of embeddings.
        forward_may_fail: if `forward` raises, calls a layer twice or returns nothing that requires a gradient, balance
            parameters and mention the reason in the text.
        in_flight: for each stage, the number of micro-batches whose activations the schedule keeps. Default: 1.
        state_factor: bytes of parameters, gradients and optimizer states on a rank for each byte of parameters.
        memory_limit: the largest number of bytes of a stage.
        limit_may_fail: ignore a limit that no cuts satisfy, and mention this in the text.

    Raises:
        ValueError: fewer layers with parameters than stages; a forward that fails, or no cuts within the limit, unless
            `forward_may_fail` or `limit_may_fail` allows it.
    """
    names = candidates(model)
    if not names:
        raise ValueError(
            f"pipeline: cuts='auto' finds no layers with parameters among the modules of a {type(model).__name__}; "
            "name the first module of each stage but the first."
        )
    if len(names) < num_stages:
        raise ValueError(
            f"pipeline: cuts='auto' finds {len(names)} layers with parameters in a {type(model).__name__} "
            f"({', '.join(map(repr, names[:4]))}{', ...' if len(names) > 4 else ''}) for {num_stages} stages; use "
            "fewer stages, or name cuts inside these layers."
        )
    layers, measure, call_order = _measure_layers(model, names, num_stages, forward, forward_may_fail)

    def cut(limit: int | None) -> Partition:
        return partition(
            [layer.forward + layer.backward for layer in layers],
            num_stages,
            activation_bytes=[layer.activation_bytes for layer in layers],
            parameter_bytes=[round(state_factor * layer.parameter_bytes) for layer in layers],
            in_flight=list(in_flight),
            memory_limit=limit,
        )

    try:
        found, remark = cut(memory_limit), ""
    except ValueError:
        if not limit_may_fail or memory_limit is None:
            raise
        found = cut(None)
        share_of_device = f"{memory_limit / 1e9:.1f} GB, its share of the device's memory"
        remark = f"; by estimate, no cuts keep each stage within {share_of_device}"
    cuts = tuple(layers[begin].name for begin in found.begins[1:])
    share = max(found.times) / (sum(found.times) or 1)
    text = (
        f"weft cuts {type(model).__name__} into {num_stages} stages, which begin at its first layer and at "
        f"{', '.join(map(repr, cuts))}: the largest has {share:.0%} of the {measure}{remark}."
    )
    return Choice(cuts, _stages_by_call_order(model, cuts, call_order), text)


def _measure_layers(
    model: nn.Module, names: list[str], num_stages: int, forward: Callable[[], Any] | None, may_fail: bool
) -> tuple[list[LayerProfile], str, list[str]]:
    """Return (layers at which stages may begin, in order of registration; the measure's name; names in call order).

    If parameters are the measure, the names are in order of registration, too.
    """
    if forward is None:
        return _by_parameters(model, names), _PARAMETERS, names
    try:
        called = _by_operations(model, names, forward)
    except Exception as error:  # the model's code may raise anything on fake tensors
        reason = str(error).partition("\n")[0].rstrip(".")
        if may_fail:
            measure = f"{_PARAMETERS} (operations were not counted: {reason})"
            return _by_parameters(model, names), measure, names
        raise ValueError(
            f"pipeline: the example of AutoCuts cannot be run through {type(model).__name__} on fake tensors ({reason})"
            "; pass another one, or none, which balances parameters."
        ) from error
    layers = _in_order(called, names)
    if len(layers) < num_stages:
        layers = sorted(called, key=lambda layer: names.index(layer.name))
    return layers, "floating-point operations", [layer.name for layer in called]


def _by_parameters(model: nn.Module, names: list[str]) -> list[LayerProfile]:
    """Return profiles whose `forward` is the number of parameters without those of embeddings.

    The operations for one token are in proportion to the parameters of matrix products.
    """
    layers = []
    for name in names:
        layer = model.get_submodule(name)
        looked_up = {id(m.weight) for m in layer.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))}
        num_multiplied = sum(p.numel() for p in layer.parameters() if id(p) not in looked_up)
        layers.append(LayerProfile(name, float(num_multiplied), 0.0, 0, sum(p.nbytes for p in layer.parameters())))
    return layers


def _by_operations(model: nn.Module, names: list[str], forward: Callable[[], Any]) -> list[LayerProfile]:
    """Return the layers in call order.

    A layer without parameters cannot begin a stage: its cost is added to the layer that is called before it, or, for
    the first layer, to the layer that is called after it.
    """
    with torch.enable_grad(), preserving_all_random_states():
        profiles = profile_layers(model, None, lambda _: _total(forward()), measure=FLOPS)
    called: list[LayerProfile] = []
    for layer in profiles:
        if layer.name in names or not called:
            called.append(layer)
        else:
            called[-1] = _sum(called[-1], layer)
    if called[0].name not in names and len(called) > 1:
        called[:2] = [dataclasses.replace(_sum(called[0], called[1]), name=called[1].name)]
    return called


def _in_order(called: list[LayerProfile], names: list[str]) -> list[LayerProfile]:
    """Merge each layer that is called out of registration order into the layer that is called just before it.

    A stage cannot begin at such a layer.
    """
    layers: list[LayerProfile] = []
    for layer in called:
        if layers and names.index(layer.name) < names.index(layers[-1].name):
            layers[-1] = _sum(layers[-1], layer)
        else:
            layers.append(layer)
    return layers


def _sum(first: LayerProfile, second: LayerProfile) -> LayerProfile:
    numbers = {
        field.name: getattr(first, field.name) + getattr(second, field.name)
        for field in dataclasses.fields(first)
        if field.name != "name"
    }
    return dataclasses.replace(first, **numbers)


def _total(outputs: Any) -> Tensor:
    """Return a scalar that depends on all outputs."""
    leaves = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not leaves:
        raise ValueError("the forward returns no tensor that requires a gradient")
    return torch.stack([leaf.sum() for leaf in leaves]).sum()


def _stages_by_call_order(model: nn.Module, cuts: Sequence[str], call_order: Sequence[str]) -> dict[str, int]:
    """Return the stages, by call order, of the layers that registration order puts on another stage."""
    stage, called = 0, {}
    for name in call_order:
        stage += name in cuts
        called[name] = stage
    moved = {}
    for layer, registered_stage in find_layers(model, cuts).stage_of.items():
        stages = {stage for name, stage in called.items() if name == layer or name.startswith(f"{layer}.")}
        if registered_stage != ANY_STAGE and len(stages) == 1 and registered_stage not in stages:
            moved[layer] = stages.pop()
    return moved
