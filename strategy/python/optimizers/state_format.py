"""The formats of an optimizer's states and of its weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MIN_ELEMENTS = 4096
STATE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}
LOW_DTYPES = {"float32": None, "split": torch.int16, "split8": torch.int8}
LOW_BITS = "low_bits"  # the state with the lower bits of split weights
SCALE = "_scale"  # ends the name of a state with the scales of another


@dataclass(frozen=True)
class StateFormat:
    """The format of an optimizer's states and of its weights.

    Attributes:
        states: "float32", "bfloat16" or "int8".
        weights: "float32" (weights keep their dtype), "split" or "split8": weights are bfloat16, and 16 or 8 lower bits
            are a state.
    """

    states: str = "float32"
    weights: str = "float32"

    def __post_init__(self) -> None:
        for name, value, known in (
            ("optimizer_state", self.states, STATE_DTYPES),
            ("master_weights", self.weights, LOW_DTYPES),
        ):
            if value not in known:
                names = ", ".join(repr(each) for each in known)
                raise ValueError(f"got {name}={value!r}; pass one of {names}.")

    @property
    def is_usual(self) -> bool:
        """Return whether this is the format of torch's optimizers."""
        return self == StateFormat()

    def state_dtype(self, parameter: Tensor) -> torch.dtype:
        """Return the dtype of the states of a parameter; int8 stands for codes."""
        return torch.float32 if is_small(parameter) else STATE_DTYPES[self.states]


def is_small(parameter: Tensor) -> bool:
    """Return whether the states of a parameter are float32 in every format."""
    return parameter.dim() < 2 or parameter.numel() < MIN_ELEMENTS
