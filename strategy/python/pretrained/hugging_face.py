"""The directory of a model of transformers: its weights in their form on disk, and its configuration files."""

from __future__ import annotations

import copy
import functools
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from weft.strategy.deferred import full_value_of, is_deferred
from weft.strategy.deferred.files import FileTensor, Region, deferred_of, read_full
from weft.strategy.deferred.tape import Tape, storage_of
from weft.strategy.deferred.tensor import DeferredTensor
from weft.strategy.pretrained.values import LazyTensor
from weft.strategy.sharding.state import original_class

_TEXT_MODULES = ("tokenizer", "processor", "image_processor", "feature_extractor")


def pretrained_model_in(model: nn.Module) -> nn.Module | None:
    """Return the model of transformers that a module is, or the only one inside that is in no other.

    None: there is none, or there are several.
    """
    transformers: Any = sys.modules.get("transformers")
    if transformers is None:
        return None
    outermost: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        is_inside = any(not other or name.startswith(f"{other}.") for other, _ in outermost)
        if not is_inside and isinstance(module, transformers.PreTrainedModel):
            outermost.append((name, module))
    return outermost[0][1] if len(outermost) == 1 else None


class _Sources:
    """The assembled tensors that the conversion at hand uses, so that several results use a tensor once."""

    def __init__(self) -> None:
        self._names: frozenset[str] = frozenset()
        self._assembled: dict[str, Tensor] = {}

    def begin(self, names: frozenset[str]) -> None:
        """Begin a conversion of these tensors; those of an earlier one are freed, unless the names are the same."""
        if names != self._names:
            self._assembled.clear()
        self._names = names

    def get(self, name: str, value: LazyTensor) -> Tensor:
        if name not in self._assembled:
            self._assembled[name] = value.full().cpu()
        return self._assembled[name]

    def end(self) -> None:
        self._assembled.clear()


class _Assembled(FileTensor):
    """Gives the calls of a conversion the values of a LazyTensor in place of a file's."""

    def __init__(self, name: str, value: LazyTensor, sources: _Sources) -> None:
        super().__init__(value.shape, value.dtype, lambda slices: sources.get(name, value)[slices])
        self.name = name

    def read(self, region: Region) -> Tensor:
        # Not in `no_dispatch`, as files are: a collective's result is waited for by a dispatch.
        return self._view(tuple(slice(first, end) for first, end in region))


def converted_for_saving(model: Any, values: dict[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Return the tensors as transformers writes them: with old names, and with fused tensors split or joined again.

    The conversions are recorded, and made for one resulting tensor at a time.
    """
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # transformers 4 has no such conversions
        return values
    tape, sources = Tape(), _Sources()
    deferred: dict[str, Tensor] = {
        name: deferred_of(_Assembled(name, value, sources), tape) for name, value in values.items()
    }
    unchanged = {id(tensor): values[name] for name, tensor in deferred.items()}
    result: dict[str, LazyTensor] = {}
    for name, tensor in revert_weight_conversion(model, deferred).items():
        if id(tensor) in unchanged:
            result[name] = unchanged[id(tensor)]
            continue
        assert is_deferred(tensor)
        names = frozenset(
            entry.args[0].name for entry in tape.needed([storage_of(tensor.meta)]) if entry.function is read_full
        )
        result[name] = LazyTensor(
            tuple(tensor.shape),
            tensor.dtype,
            tensor.device,
            any(values[each].has_no_values for each in names),
            functools.partial(_convert, tensor, names, sources),
            group=",".join(sorted(names)),
            free=sources.end,
        )
    return result


def _convert(tensor: DeferredTensor, names: frozenset[str], sources: _Sources) -> Tensor:
    sources.begin(names)
    return full_value_of(tensor)


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
