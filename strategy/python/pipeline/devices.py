"""Stages on several devices of one process, run in sequence: a manual split, without schedules or processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from weft.strategy.pipeline.layer_calls import InterceptedLayer, Mode, intercept_calls, run_in_mode
from weft.strategy.pipeline.recording import name_of
from weft.strategy.pipeline.staged_model import staged_model_of, tied_parameters
from weft.strategy.pipeline.stages import ANY_STAGE, Layers, find_layers
from weft.strategy.torch_functions import writes_in_place

_KEY = "_weft_devices"
# Functions of torch whose arguments may be on different devices.
_ACROSS_DEVICES = ("to", "copy_", "__setitem__", "cpu", "cuda")


def spread_over_devices(
    model: nn.Module,
    cuts: Sequence[str],
    devices: Sequence[torch.device | str],
    *,
    layer_stages: Mapping[str, int] | None = None,
) -> nn.Module:
    """Place the layers of each stage on the stage's device, in place; the forward then moves tensors between devices.

    Outputs are usually on the last stage's device; the backward moves gradients the opposite way. A layer that shares a
    parameter with an earlier stage is placed on that stage's device; a layer without parameters and persistent
    buffers is not moved. Build optimizers afterwards, and do not call `model.to` any more.

    Args:
        model: any module; its forward stays as it is.
        cuts: the names of the first module of each stage but the first, as in `Pipeline`.
        devices: one for each stage; a device may occur more than once.
        layer_stages: as in `Pipeline`.

    Returns:
        The model.

    Raises:
        ValueError: cuts that do not fit the model, a wrong number of devices, or a model that is already in stages.
    """
    if staged_model_of(model) is not None or _KEY in model.__dict__:
        raise ValueError(f"pipeline: this {type(model).__name__} is in stages already; build the model anew.")
    if len(devices) != len(cuts) + 1:
        raise ValueError(
            f"pipeline: {len(cuts)} cuts make {len(cuts) + 1} stages, and there are {len(devices)} devices; pass one "
            "for each stage."
        )
    stage_devices = [torch.device(device) for device in devices]
    layers = find_layers(model, cuts, layer_stages)
    stage_of = _stages_with_tied_layers(model, layers)
    for name, stage in stage_of.items():
        layer = model.get_submodule(name)
        if stage != ANY_STAGE:
            layer.to(stage_devices[stage])
        intercept_calls(layer, name, stage)
    for name, stage in layers.parameter_stages.items():
        holder = model.get_submodule(name.rpartition(".")[0])
        _move_parameter(holder, name.rpartition(".")[2], stage_devices[stage])
    model.__dict__[_KEY] = stage_devices
    cls = type(model)
    model.__class__ = type(cls.__name__, (_Root, cls), {"__module__": cls.__module__})
    return model


class _Root:
    """The first base of the class of a model on several devices: its forward moves tensors between the devices."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return run_in_mode(_MovingMode(self.__dict__[_KEY]), lambda: super(_Root, self).forward(*args, **kwargs))  # type: ignore[misc]


class _MovingMode(Mode):
    """Moves the arguments of a layer to its stage's device, and those of a function between layers to one device.

    Arguments of layers without a stage are not moved.

    stage_devices: the device of each stage.
    """

    def __init__(self, stage_devices: list[torch.device]) -> None:
        super().__init__()
        self._stage_devices = stage_devices

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, name_of(func)
        if name not in _ACROSS_DEVICES:
            found = {leaf.device for leaf in pytree.tree_leaves((args, kwargs)) if _needs_move(leaf)}
            if len(found) > 1:
                target = args[0].device if writes_in_place(name) else max(found, key=self._last_stage_on)
                args, kwargs = _to_device((args, kwargs), target)
        return func(*args, **kwargs)

    def _last_stage_on(self, device: torch.device) -> int:
        return max((stage for stage, each in enumerate(self._stage_devices) if each == device), default=-1)

    def call_layer(self, layer: InterceptedLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        stage = layer._weft_layer[1]
        if stage != ANY_STAGE:
            args, kwargs = _to_device((args, kwargs), self._stage_devices[stage])
        return self._without_interception(lambda: layer.call_directly(args, kwargs))


def _needs_move(leaf: Any) -> bool:
    """Return whether a leaf is a tensor whose device matters: a CPU tensor without dims works with any device."""
    return isinstance(leaf, Tensor) and not (leaf.dim() == 0 and leaf.device.type == "cpu")


def _to_device(tree: Any, device: torch.device) -> Any:
    # A non-blocking copy to the CPU returns before its values have arrived, and the CPU does not wait for them.
    non_blocking = device.type != "cpu"
    return pytree.tree_map(lambda leaf: leaf.to(device, non_blocking=non_blocking) if _needs_move(leaf) else leaf, tree)


def _move_parameter(holder: nn.Module, name: str, device: torch.device) -> None:
    """Move one parameter of `holder`; all its other parameters stay where they are."""
    moved = nn.Module()
    moved.register_parameter(name, holder._parameters[name])
    holder._parameters[name] = moved.to(device)._parameters[name]


def _stages_with_tied_layers(model: nn.Module, layers: Layers) -> dict[str, int]:
    """Return the stage of each layer; layers that share a parameter are on the first of their stages."""
    stage_of = dict(layers.stage_of)
    for tied in tied_parameters(model, layers):
        for stage, name in tied.name_on.items():
            layer = next((each for each in stage_of if name == each or name.startswith(f"{each}.")), None)
            if layer is not None and stage != min(tied.name_on):
                stage_of[layer] = min(tied.name_on)
    return stage_of
