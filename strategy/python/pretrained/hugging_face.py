"""The directory of a model of transformers: its weights in their form on disk, and its configuration files."""

from __future__ import annotations

import copy
import functools
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._mode_utils import no_dispatch

from weft.strategy.deferred import full_value_of, is_deferred
from weft.strategy.deferred.files import FileTensor, Region, deferred_of
from weft.strategy.deferred.tape import Tape
from weft.strategy.pretrained.values import LazyTensor
from weft.strategy.sharding.state import original_class

_TEXT_MODULES = ("tokenizer", "processor", "image_processor", "feature_extractor")


def pretrained_model_in(model: nn.Module) -> tuple[nn.Module | None, str]:
    """Return the model of transformers that a module is, or the only one inside, with its name and a dot.

    (None, ""): there is none, or there are several, none inside another.
    """
    transformers: Any = sys.modules.get("transformers")
    if transformers is None:
        return None, ""
    outermost: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        is_inside = any(not other or name.startswith(f"{other}.") for other, _ in outermost)
        if not is_inside and isinstance(module, transformers.PreTrainedModel):
            outermost.append((name, module))
    if len(outermost) != 1:
        return None, ""
    [(name, module)] = outermost
    return module, f"{name}." if name else ""


class _Assembled(FileTensor):
    """Gives the calls of a conversion the values of a LazyTensor in place of a file's."""

    def __init__(self, value: LazyTensor) -> None:
        super().__init__(value.shape, value.dtype, lambda slices: value.full().cpu()[slices])

    def read(self, region: Region) -> Tensor:
        with no_dispatch():
            return self._view(tuple(slice(first, end) for first, end in region))


def converted_for_saving(model: Any, values: dict[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Return the tensors as transformers writes them: with old names, and with fused tensors split or joined again.

    The conversions are recorded, and made for one resulting tensor at a time.
    """
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # transformers 4 has no such conversions
        return values
    tape = Tape()
    deferred: dict[str, Tensor] = {name: deferred_of(_Assembled(value), tape) for name, value in values.items()}
    sources = {id(tensor): values[name] for name, tensor in deferred.items()}
    result: dict[str, LazyTensor] = {}
    for name, tensor in revert_weight_conversion(model, deferred).items():
        if id(tensor) in sources:
            result[name] = sources[id(tensor)]
        else:
            assert is_deferred(tensor)
            assemble = functools.partial(full_value_of, tensor)
            result[name] = LazyTensor(tuple(tensor.shape), tensor.dtype, tensor.device, False, assemble)
    return result


def save_configuration(model: nn.Module, saved: Any, folder: Path, dtype: torch.dtype | None) -> None:
    """Write config.json, the generation config, and the files of tokenizers and processors, if there are any."""
    config = copy.deepcopy(saved.config)
    config.architectures = [original_class(saved).__name__]
    dtype = dtype or next((p.dtype for p in saved.parameters() if p.is_floating_point()), None)
    if dtype is not None:
        config.dtype = str(dtype).removeprefix("torch.")
    config.save_pretrained(folder)
    if saved.can_generate() and getattr(saved, "generation_config", None) is not None:
        saved.generation_config.save_pretrained(folder)
    for owner in dict.fromkeys((model, saved)):
        for name in _TEXT_MODULES:
            part: Any = getattr(owner, name, None)
            if hasattr(part, "save_pretrained"):
                part.save_pretrained(folder)
