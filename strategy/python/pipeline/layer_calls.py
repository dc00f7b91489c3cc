"""Intercepts the calls of a model's layers, and of torch's functions between them, while a forward runs."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from weft.strategy.pipeline.fake_mode import is_recorded
from weft.strategy.sharding.remote_layers import active_mode


class Mode(TorchFunctionMode, abc.ABC):
    """Intercepts a forward's calls of layers, and of torch's functions between them."""

    @abc.abstractmethod
    def call_layer(self, layer: InterceptedLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of a layer's call."""

    def _without_interception(self, function: Callable[[], Any]) -> Any:
        """Return the result of `function`, which calls a layer, without intercepting the calls inside the layer."""
        self.__exit__(None, None, None)
        try:
            return function()
        finally:
            self.__enter__()


class InterceptedLayer:
    """The first base of the class that `intercept_calls` gives a layer: the active mode handles the layer's calls.

    While no mode is active, calls are not intercepted.
    """

    _weft_layer: tuple[str, int]  # the layer's name and stage

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        mode: Mode | None = active_mode.get()
        if mode is None:
            if any(is_recorded(argument) for argument in (*args, *kwargs.values())):
                raise RuntimeError(
                    f"pipeline: the layer {self._weft_layer[0]!r} was called outside of the forward with a fake tensor "
                    "of another stage, as torch.utils.checkpoint between layers does; use "
                    "weft.strategy.checkpoint_activations, or checkpoint inside of the layer."
                )
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        return mode.call_layer(self, args, kwargs)

    def call_directly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return super().__call__(*args, **kwargs)  # type: ignore[misc]


_classes: dict[type, type] = {}


def intercept_calls(layer: nn.Module, name: str, stage: int) -> None:
    """Intercept a layer's calls: replace its class by a subclass with the same name."""
    if not isinstance(layer, InterceptedLayer):
        cls = type(layer)
        if cls not in _classes:
            _classes[cls] = type(cls.__name__, (InterceptedLayer, cls), {"__module__": cls.__module__})
        layer.__class__ = _classes[cls]
    layer.__dict__["_weft_layer"] = (name, stage)


def run_in_mode(mode: Mode, forward: Callable[[], Any]) -> Any:
    """Call a forward; `mode` intercepts the calls of its layers."""
    if active_mode.get() is not None:
        raise RuntimeError(
            "pipeline: a model in stages was called inside the forward of another one; call one after the other."
        )
    token = active_mode.set(mode)
    # nn.TransformerEncoder takes its fast path for some types of inputs only; recordings and runs have different types.
    has_fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with mode:
            return forward()
    finally:
        torch.backends.mha.set_fastpath_enabled(has_fast_path)
        active_mode.reset(token)
