"""Applies the renames of transformers to names in files, and raises an error where it would fuse or split tensors."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from torch import nn


def names_in_model(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Return the name in the model for each name in the files; unchanged unless the model is one of transformers.

    Raises:
        ValueError: transformers would convert a tensor, such as fuse it with others.
    """
    transformers: Any = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return {name: name for name in names}
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    except ImportError:  # transformers 4
        return {name: name for name in names}
    mapping = get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    state = dict.fromkeys(model.state_dict(), True)
    result = {}
    for name in names:
        renamed, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if pattern is not None and renamed in state:
            raise ValueError(
                f"load_pretrained got {name!r}, from which transformers makes {renamed!r} by a conversion of its own; "
                "call from_pretrained inside configure_model or weft.strategy.deferred_init, which converts it."
            )
        result[name] = name if renamed not in state and name in state else renamed
    return result
