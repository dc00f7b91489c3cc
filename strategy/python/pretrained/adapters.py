"""The directory of adapters in the format of PEFT: their weights, and the configuration with which PEFT loads them."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

from torch import nn

from weft.strategy.pretrained.values import LazyTensor
from weft.strategy.recognition.adapters import is_adapted
from weft.strategy.sharding.state import original_class

FILE = "adapter_model.safetensors"
_AT_ROOT = "default"  # the adapter whose files are in the directory itself; those of others are in a folder of its name


def peft_model_in(model: nn.Module) -> nn.Module | None:
    """Return the PeftModel that a module is, or the only one inside; None if there is none.

    Raises:
        ValueError: there are several, or layers have adapters outside of a PeftModel.
    """
    peft: Any = sys.modules.get("peft")
    if peft is None:
        return None
    found: list[tuple[str, nn.Module]] = [
        (name, module) for name, module in model.named_modules() if isinstance(module, peft.PeftModel)
    ]
    if len(found) > 1:
        names = ", ".join(repr(name) for name, _ in found)
        raise ValueError(f"save_pretrained got several models with adapters ({names}); pass one of them.")
    if found:
        return found[0][1]
    adapted = next((name for name, module in model.named_modules() if is_adapted(module)), None)
    if adapted is not None:
        raise ValueError(
            f"save_pretrained got {adapted!r}, a layer with adapters, in a model that is no PeftModel; pass the "
            "result of get_peft_model, or merge the adapters first."
        )
    return None


def adapter_values(model: Any, values: dict[str, LazyTensor]) -> dict[str, dict[str, LazyTensor]]:
    """Return the tensors of each adapter by their names in its file, by the adapter's folder.

    `values`: the tensors of the PeftModel that this rank holds.
    """
    from peft import get_peft_model_state_dict

    found: dict[str, dict[str, LazyTensor]] = {}
    for adapter, config in model.peft_config.items():
        of_adapter = get_peft_model_state_dict(model, values, adapter_name=adapter)
        if not all(isinstance(value, LazyTensor) for value in of_adapter.values()):
            kind = getattr(config.peft_type, "value", config.peft_type)
            raise ValueError(
                f"save_pretrained got an adapter of the type {kind}, whose weights PEFT computes; use LoRA."
            )
        found["" if adapter == _AT_ROOT else adapter] = of_adapter
    return found


def save_adapter_configuration(model: Any, directory: Path) -> None:
    """Write the configuration of each adapter, whose folders exist."""
    for adapter, own in model.peft_config.items():
        config = copy.deepcopy(own)
        config.inference_mode = True  # as PEFT's own files
        base = model.get_base_model()
        config.base_model_name_or_path = config.base_model_name_or_path or base.__dict__.get("name_or_path") or None
        cls = original_class(base)
        mapping = {"base_model_class": cls.__name__, "parent_library": cls.__module__}
        folder = directory if adapter == _AT_ROOT else directory / adapter
        config.save_pretrained(folder, auto_mapping_dict=mapping if config.task_type is None else None)
