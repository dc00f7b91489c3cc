"""Stand-ins for layers of other pipeline stages."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

# The mode that intercepts the calls of the current forward, which runs in stages or is being recorded.
active_mode: contextvars.ContextVar[Any] = contextvars.ContextVar("weft_pipeline_mode", default=None)


class RemoteLayer(nn.Module):
    """A layer of another stage: it has no modules and, except inside `placeholder_parameters`, no parameters.

    Plain attributes are those of `skeleton`, because code between layers reads some. While a forward is intercepted
    (`active_mode`), parameters and modules are those of `skeleton`, too: they have fake tensors, and results computed
    with them are received from the layer's stage. At other times, reading a tensor or a module raises AttributeError.

    skeleton: the same layer in a copy of the full model that has fake tensors.
    """

    def __init__(self, name: str, stage: int, skeleton: nn.Module) -> None:
        super().__init__()
        # Not by setattr, which would register the skeleton as a child module.
        self.__dict__.update(_weft_name=name, _weft_stage=stage, _weft_skeleton=skeleton)

    def __getattr__(self, attribute: str) -> Any:
        skeleton = self.__dict__["_weft_skeleton"]
        if not hasattr(skeleton, attribute):
            raise AttributeError(f"{type(skeleton).__name__!r} object has no attribute {attribute!r}")
        value = getattr(skeleton, attribute)
        if active_mode.get() is not None or not isinstance(value, (Tensor, nn.Module)):
            return value
        self._raise_unavailable(f"its {attribute!r} was read", AttributeError)

    @property
    def __class__(self) -> type:
        # While a forward runs, isinstance(layer, nn.Linear) gives the same result as on the layer's own stage.
        return type(self) if active_mode.get() is None else type(self.__dict__["_weft_skeleton"])

    @__class__.setter
    def __class__(self, cls: type) -> None:
        object.__dict__["__class__"].__set__(self, cls)

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(
            f"pipeline: the layer {self._weft_name!r} ({type(self._weft_skeleton).__name__}) is on stage "
            f"{self._weft_stage}, and it was called outside of the model's forward on a rank of other stages; call the "
            "full model, in a step."
        )

    def extra_repr(self) -> str:
        return f"{type(self._weft_skeleton).__name__} of stage {self._weft_stage}"

    def _raise_unavailable(self, what: str, error: type[Exception]) -> NoReturn:
        raise error(
            f"pipeline: the layer {self._weft_name!r} ({type(self._weft_skeleton).__name__}) is on stage "
            f"{self._weft_stage}, and {what} on a rank of other stages; do that on the rank of this stage."
        )


@contextlib.contextmanager
def placeholder_parameters(model: nn.Module, device: torch.device) -> Iterator[list[nn.Parameter]]:
    """Inside, each RemoteLayer has an empty parameter of the same name and dtype for each parameter of its layer.

    An empty parameter has as many dims as the layer's, at least one. Code that sorts a model's parameters by names or
    dims, as for parameter groups, then makes the same groups on every stage. None of them is an empty list, which
    optimizers reject. Yields the empty parameters.
    """
    remote_layers = [module for module in model.modules() if type(module) is RemoteLayer]
    placeholders: list[nn.Parameter] = []
    for layer in remote_layers:
        for name, parameter in layer.__dict__["_weft_skeleton"].named_parameters():
            empty = torch.empty((0,) * max(1, parameter.dim()), dtype=parameter.dtype, device=device)
            placeholders.append(nn.Parameter(empty, requires_grad=parameter.requires_grad))
            layer._parameters[name] = placeholders[-1]  # not by register_parameter, which takes no dots in names
    try:
        yield placeholders
    finally:
        for layer in remote_layers:
            layer._parameters.clear()


@contextlib.contextmanager
def counted_parameters(model: nn.Module, skeleton: nn.Module) -> Iterator[None]:
    """Inside, each RemoteLayer has a meta parameter for each parameter of its layer, so that counts are those of all.

    A parameter that this stage holds, too, such as a tied one, is left out.

    skeleton: the copy of the full model, with `model`'s names, of which the RemoteLayers have their layers.
    """
    own = {name for name, parameter in model.named_parameters(remove_duplicate=False)}
    full = dict(skeleton.named_parameters(remove_duplicate=False))
    added: dict[int, nn.Parameter | None] = {id(full[name]): None for name in own if name in full}
    remote_layers = [module for module in model.modules() if type(module) is RemoteLayer]
    for layer in remote_layers:
        for name, parameter in layer.__dict__["_weft_skeleton"].named_parameters():
            if id(parameter) not in added:
                meta = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                added[id(parameter)] = nn.Parameter(meta, requires_grad=parameter.requires_grad)
            layer._parameters[name] = added[id(parameter)]
    try:
        yield
    finally:
        for layer in remote_layers:
            layer._parameters.clear()


def names_with_remote_layers(model: nn.Module) -> list[str]:
    """Return the names of a model's modules, including layers on other stages, in the order of the full model."""
    names: list[str] = []
    for name, module in model.named_modules(remove_duplicate=False):
        names.append(name)
        if isinstance(module, RemoteLayer):
            inner = module._weft_skeleton.named_modules(remove_duplicate=False)
            names += [f"{name}.{inner_name}" for inner_name, _ in inner if inner_name]
    return names


_COPIES = "_weft_copies_of_tied"


def mark_copy(module: nn.Module, name: str, is_first: bool) -> None:
    """Record that a module's parameter is this stage's copy of one that other stages hold, too.

    is_first: whether the stage is the first of them.
    """
    module.__dict__.setdefault(_COPIES, {})[name] = is_first


def is_copy(module: nn.Module, name: str) -> bool:
    """Return whether a module's parameter is a copy of one that other stages hold, too."""
    return name in module.__dict__.get(_COPIES, {})


def later_copies(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a model that are copies of those of an earlier stage on another rank."""
    copies = [
        (parameter, is_first)
        for module in model.modules()
        for name, is_first in module.__dict__.get(_COPIES, {}).items()
        if (parameter := module._parameters.get(name)) is not None
    ]
    first_copies = {id(parameter) for parameter, is_first in copies if is_first}
    return [parameter for parameter, is_first in copies if not is_first and id(parameter) not in first_copies]
