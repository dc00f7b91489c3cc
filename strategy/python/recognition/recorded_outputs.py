"""Keeps the recording of intermediate outputs by Hugging Face's Transformers when a module's class changes.

`output_hidden_states`, `output_attentions` and `output_router_logits` record the outputs of layers. Transformers looks
up which layers these are by the name of the model's class, and records nothing for a name that it does not know.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn


def keep_recorded_outputs(model: nn.Module) -> None:
    """Make the current classes of a model and of the modules inside known to Transformers, if it is imported."""
    registry: Any = getattr(sys.modules.get("transformers.utils.output_capturing"), "_CAN_RECORD_REGISTRY", None)
    if not isinstance(registry, dict):
        return
    for cls in {type(module) for module in model.modules()}:
        recorded = getattr(cls, "_can_record_outputs", None)
        if recorded is not None:
            # Its own __setitem__ takes the model in some versions, and the name in others.
            dict.setdefault(registry, str(cls), recorded)
