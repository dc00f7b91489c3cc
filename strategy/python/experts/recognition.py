"""Recognises the modules of a model that hold the experts of a layer in tensors `[experts, ...]`.

These are modules in the form of Hugging Face's Transformers: the forward gets the tokens, the ids of their experts and
the weights of these, and attributes describe how the tensors are laid out.
"""

from __future__ import annotations

import dataclasses
import inspect

from torch import Tensor, nn

from weft.strategy._plan import shard_range
from weft.strategy.sharding.state import original_class

_NUM_ARGUMENTS = 3  # of the forward: tokens, ids of experts, weights
_FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")


@dataclasses.dataclass(frozen=True)
class ExpertsLayout:
    """The parameters of a module with experts, each of which is an MLP of two layers.

    up, down: the names of the weights `[experts, out, in]`, or `[experts, in, out]` if `is_transposed`. A gated MLP has
        gate and up in one weight of twice the hidden size.
    up_bias, down_bias: the names of the biases `[experts, out]`; None: there are none.
    is_concatenated: of a gated MLP: gate and up are halves of the weight; else its features alternate between them.
    """

    up: str
    down: str
    up_bias: str | None
    down_bias: str | None
    has_gate: bool
    is_transposed: bool
    is_concatenated: bool

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all parameters."""
        return tuple(name for name in (self.up, self.down, self.up_bias, self.down_bias) if name is not None)


def find_experts(model: nn.Module) -> dict[str, ExpertsLayout]:
    """Return the modules that hold experts, by name."""
    found = {name: layout_of(module) for name, module in model.named_modules()}
    return {name: layout for name, layout in found.items() if layout is not None}


def num_experts_of(module: nn.Module, layout: ExpertsLayout) -> int:
    """Return the number of experts of a module, those of other ranks included."""
    weight = module._parameters[layout.down]
    assert weight is not None
    return int(weight.shape[0])


def why_not_sharded(module: nn.Module, layout: ExpertsLayout, num_ranks: int) -> str | None:
    """Return the reason why a module's experts cannot be sharded over so many ranks; None: they can.

    Each rank must hold an expert, because FSDP2 does not shard empty parameters.
    """
    num_experts = num_experts_of(module, layout)
    if shard_range(num_experts, num_ranks, num_ranks - 1)[1] > 0:
        return None
    return (
        f"of its {num_experts} experts, the last of {num_ranks} ranks would hold none; use a number of ranks that "
        "divides the number of experts"
    )


def layout_of(module: nn.Module) -> ExpertsLayout | None:
    """Return the layout of a module's experts; None: the module holds no experts in this form."""
    if not all(isinstance(getattr(module, flag, None), bool) for flag in _FLAGS) or module._modules.keys() - {"act_fn"}:
        return None
    has_gate, has_bias, is_transposed, is_concatenated = (bool(getattr(module, flag)) for flag in _FLAGS)
    if not _takes_choices(module) or (has_gate and not callable(getattr(module, "_apply_gate", None))):
        return None
    up = "gate_up_proj" if has_gate else "up_proj"
    up_bias, down_bias = (f"{up}_bias", "down_proj_bias") if has_bias else (None, None)
    layout = ExpertsLayout(up, "down_proj", up_bias, down_bias, has_gate, is_transposed, is_concatenated)
    parameters = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    return layout if parameters.keys() == set(layout.names) and _fits(parameters, layout) else None


def _fits(parameters: dict[str, nn.Parameter], layout: ExpertsLayout) -> bool:
    """Return whether the shapes of the parameters are those of the layout."""
    weights: list[Tensor] = [parameters[layout.up], parameters[layout.down]]
    if any(weight.dim() != 3 for weight in weights):
        return False
    (experts, up_out, up_in), (others, down_out, down_in) = (
        (w.shape[0], *(reversed(w.shape[1:]) if layout.is_transposed else w.shape[1:])) for w in weights
    )
    num_hidden = up_out // 2 if layout.has_gate else up_out
    shapes = {layout.up_bias: (experts, up_out), layout.down_bias: (experts, down_out)}
    return (
        experts == others
        and (down_in, down_out) == (num_hidden, up_in)
        and all(tuple(parameters[name].shape) == shape for name, shape in shapes.items() if name is not None)
    )


def _takes_choices(module: nn.Module) -> bool:
    try:
        parameters = inspect.signature(inspect.unwrap(original_class(module).forward)).parameters
    except (TypeError, ValueError):
        return False
    return len(parameters) == 1 + _NUM_ARGUMENTS
