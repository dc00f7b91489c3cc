"""Recognises linear layers with low-rank adapters (LoRA of PEFT), so that plans treat them as the layer inside.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021): a frozen layer's output W x gets the summand
scaling * B A dropout(x), where A is [r, in] and B is [out, r]. The sum is a linear layer as well, so all that
verification finds out for W holds for the sum, and its two factors are sharded to match:

    style of the layer               A                      B
    column, column_gather_output     replicated             the style of the layer
    row, row_split_input             the style of the layer replicated

A column layer's B sums the gradient of its input, so A gets the full gradient on each rank; a row layer's A sums its
output, so B gets full inputs.

Plans are made while the adapters are hidden: each layer is then found under the name that it has without its adapter.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

from torch import nn

from weft.strategy.recognition.assignments import AdaptedLayer, Assignments, join
from weft.strategy.recognition.linears import ADAPTED, COLUMN_STYLES, ROW_STYLES, features, why_no_linear
from weft.strategy.sharding.shard_dropout import ShardedDim
from weft.strategy.sharding.state import original_class

_BASE = "base_layer"


def is_adapted(module: nn.Module) -> bool:
    """Return whether a module is a layer of PEFT that contains another layer and its adapters, of any kind."""
    return _has_peft_class(module, "BaseTunerLayer")


def is_of_peft(module: nn.Module) -> bool:
    """Return whether PEFT has put a module in the place of another one."""
    return original_class(module).__module__.startswith("peft.")


def has_adapted_parameter(module: nn.Module) -> bool:
    """Return whether a module of PEFT adapts a parameter of the module inside, as `target_parameters` of LoRA asks.

    In its forward, PEFT puts the sum of the parameter and its adapter in the parameter's place: both must be plain.
    """
    return _has_peft_class(module, "ParamWrapper")


def _has_peft_class(module: nn.Module, name: str) -> bool:
    classes = original_class(module).__mro__
    return any(cls.__name__ == name and cls.__module__.startswith("peft.") for cls in classes)


def factors_of(module: nn.Module) -> dict[str, tuple[nn.Module, nn.Module]] | None:
    """Return (A, B) of each adapter of a linear layer; None for other modules and variants of LoRA, such as DoRA."""
    base, down, up = (module._modules.get(name) for name in (_BASE, "lora_A", "lora_B"))
    if base is None or down is None or up is None or not _has_peft_class(module, "LoraLayer"):
        return None
    if getattr(original_class(module).forward, "__qualname__", "") != "Linear.forward":
        return None
    if why_no_linear(base) is not None:
        return None
    if getattr(module, "lora_variant", None) or any(getattr(module, "use_dora", {}).values()):
        return None
    if not down._modules or down._modules.keys() != up._modules.keys():
        return None
    factors = {name: (down._modules[name], up._modules[name]) for name in down._modules}
    fan_in, fan_out = features(base)
    found: dict[str, tuple[nn.Module, nn.Module]] = {}
    for name, (a, b) in factors.items():
        if a is None or b is None or why_no_linear(a) is not None or why_no_linear(b) is not None:
            return None
        if features(a)[0] != fan_in or features(b)[1] != fan_out:
            return None
        found[name] = (a, b)
    return found


@contextlib.contextmanager
def hidden_adapters(model: nn.Module) -> Iterator[dict[str, AdaptedLayer]]:
    """Inside, linear layers with adapters are replaced by the layers without; yields them by their names in the model.

    Layers inside a hidden one are not searched. Nothing is hidden twice: an inner context yields nothing.
    """
    adapted: dict[str, AdaptedLayer] = {}
    hidden: list[tuple[nn.Module, str, nn.Module]] = []
    for parent_name, parent in list(model.named_modules(remove_duplicate=False)):
        for key, module in parent._modules.items():
            factors = None if module is None else factors_of(module)
            if module is None or factors is None:
                continue
            name = join(parent_name, key)
            dropouts = [each for each, m in module.named_modules() if isinstance(m, nn.Dropout) and m.p > 0]
            adapted[name] = AdaptedLayer(
                features(module.get_submodule(_BASE))[0],
                f"{name}.{_BASE}",
                tuple((f"{name}.lora_A.{each}", f"{name}.lora_B.{each}") for each in factors),
                tuple(f"{name}.{each}" for each in dropouts),
            )
            hidden.append((parent, key, module))
    try:
        for parent, key, module in hidden:
            base = module.get_submodule(_BASE)
            base.__dict__[ADAPTED] = True
            parent._modules[key] = base
        yield adapted
    finally:
        for parent, key, module in hidden:
            parent._modules[key] = module
            module.get_submodule(_BASE).__dict__.pop(ADAPTED, None)


def expand(assignments: Assignments, adapted: dict[str, AdaptedLayer]) -> None:
    """Give the modules of adapted layers the styles that follow from those of the layers, which the model has again."""
    for name, layer in adapted.items():
        if f"{name}.weight" in assignments.unread_aliases:
            assignments.unread_aliases.add(f"{layer.base}.weight")
        own = assignments.styles.get(name)
        if own is None or own.style in ("ignore", "sequence_parallel"):  # styles of all modules inside
            continue
        del assignments.styles[name]
        assignments.adapted[name] = (layer, own)
        for module, style in _styles_of(layer, own.style).items():
            note = own.note if module == layer.base else f"adapter of '{name}'"
            assignments.styles[module] = dataclasses.replace(own, style=style, note=note)
        if own.style == "row" and assignments.tp_size > 1:
            for dropout in layer.dropouts:
                assignments.dropouts[dropout] = (ShardedDim(2, 1, layer.in_features),)


def collapsed(assignments: Assignments) -> Assignments:
    """Return the assignments as they were before `expand`."""
    expanded = {module for layer, own in assignments.adapted.values() for module in _styles_of(layer, own.style)}
    styles = {name: each for name, each in assignments.styles.items() if name not in expanded}
    styles |= {name: own for name, (_, own) in assignments.adapted.items()}
    return dataclasses.replace(assignments, styles=styles)


def _styles_of(layer: AdaptedLayer, style: str) -> dict[str, str]:
    """Return the styles, by module, of the base layer and its adapters that follow from a style of the layer."""
    base_style = "column_gather_output" if style == "vocab_head" else style
    styles = {layer.base: base_style}
    for a, b in layer.factors:
        if base_style in COLUMN_STYLES:
            styles |= {b: base_style}
        elif base_style in ROW_STYLES:
            styles |= {a: base_style}
        elif style == "replicate_sum_gradients":
            styles |= {a: style, b: style}
    return styles
