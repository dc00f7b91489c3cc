"""What stands where a layer of another stage was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from torch import Tensor, nn

from weft.strategy.pipeline.layer_calls import is_running
from weft.strategy.pipeline.stages import ANY_STAGE, Layers


class AbsentLayer(nn.Module):
    """A layer of another stage: without parameters and modules, and an error for whoever asks for them.

    Its plain attributes are there, for the code between layers reads some. While a stage's part of a forward runs,
    its parameters are, too, as fake tensors: what is computed with them crosses from its stage.

    skeleton: the layer in the skeleton of the whole model.
    """

    def __init__(self, name: str, stage: int, skeleton: nn.Module) -> None:
        super().__init__()
        # Not by setattr, which would make the skeleton a module of this one.
        self.__dict__.update(_weft_name=name, _weft_stage=stage, _weft_skeleton=skeleton)

    def __getattr__(self, attribute: str) -> Any:
        skeleton = self.__dict__["_weft_skeleton"]
        if not hasattr(skeleton, attribute):
            raise AttributeError(f"{type(skeleton).__name__!r} object has no attribute {attribute!r}")
        value = getattr(skeleton, attribute)
        if is_running() or not isinstance(value, (Tensor, nn.Module)):
            return value
        self._refuse(f"its {attribute!r} was asked for", AttributeError)

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("it was called outside of a pipeline's step", RuntimeError)

    def extra_repr(self) -> str:
        return f"{type(self._weft_skeleton).__name__} of stage {self._weft_stage}"

    def _refuse(self, what: str, error: type[Exception]) -> NoReturn:
        raise error(
            f"pipeline: the layer {self._weft_name!r} ({type(self._weft_skeleton).__name__}) is on stage "
            f"{self._weft_stage}, and {what} on a rank of other stages; do that on a rank of its own stage."
        )


def remove_layers(model: nn.Module, skeleton: nn.Module, layers: Layers, stages: Sequence[int]) -> None:
    """Replace the layers that are on none of `stages`, in place."""
    for name, stage in layers.stage_of.items():
        if stage != ANY_STAGE and stage not in stages:
            parent_name, _, child_name = name.rpartition(".")
            parent = model.get_submodule(parent_name)
            parent._modules[child_name] = AbsentLayer(name, stage, skeleton.get_submodule(name))
