"""plan="huggingface": the tensor-parallel plans that Hugging Face's models bring with them, in weft's styles."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from weft.strategy import _plan, attention, mlp_parts
from weft.strategy.assignments import Assignments, join, parent_name, place_mlp, shown
from weft.strategy.plan_text import HUGGING_FACE_STYLES
from weft.strategy.rules import assign_rules


def style_of(pattern: str, value: str) -> str:
    """The style that a name of Hugging Face's stands for; ValueError for one that weft has nothing for."""
    style = HUGGING_FACE_STYLES.get(value, value)
    if style in _plan.STYLES:
        return style
    raise ValueError(
        f"plan: Hugging Face's plan gives '{pattern}' the style '{value}', which weft does not have; pass a plan of "
        "rules, or 'auto'."
    )


def assign_hugging_face(model: nn.Module, tp_size: int) -> Assignments:
    """The styles for the models of Hugging Face inside a model, which is one itself or calls some.

    Attention and MLPs are recognised as "auto" does it, so that heads are checked and fitting MLPs fused. Rules that
    match nothing, which the plans of whole families have, are noted.

    Raises:
        ValueError: no plan was found, it has a style that weft does not have, or heads do not divide.
    """
    result = Assignments(tp_size)
    found = dict(_plans_inside(model))
    if not found:
        raise ValueError(
            "plan='huggingface' finds no model with a plan of its own (tp_plan, or base_model_tp_plan of its config) "
            f"in a {type(model).__name__}; pass 'auto' or a plan of rules."
        )
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, values in found.items():
        rules = []
        for pattern, value in values.items():
            rule = _plan.Rule(join(name, pattern), style_of(pattern, value))
            if any(_plan.matches(rule.pattern, module) for module in modules):
                rules.append(rule)
            else:
                result.notes.append(f"{rule.pattern}: of Hugging Face's plan, matches nothing")
        _assign(result, model, modules, _plan.Plan(rules))
    return result


def _plans_inside(model: nn.Module) -> Iterator[tuple[str, Mapping[str, str]]]:
    """(name, plan) of the outermost modules that have one; patterns are relative to the module."""
    outer: list[str] = []
    for name, module in model.named_modules():
        if any(not above or name.startswith(f"{above}.") for above in outer):
            continue
        plan = _plan_of(module)
        if plan:
            outer.append(name)
            yield name, plan


def _plan_of(module: nn.Module) -> dict[str, str]:
    config = module.__dict__.get("config")
    of_base: Any = getattr(config, "base_model_tp_plan", None)
    own: Any = getattr(module, "tp_plan", None) or getattr(module, "_tp_plan", None)
    if isinstance(own, Mapping) and own:
        return dict(own)
    if not (isinstance(of_base, Mapping) and of_base):
        return {}
    prefix = getattr(module, "base_model_prefix", "")
    inside = prefix if prefix in module._modules else ""
    return {join(inside, pattern): value for pattern, value in of_base.items()}


def _assign(result: Assignments, model: nn.Module, modules: Mapping[str, nn.Module], plan: _plan.Plan) -> None:
    resolved = dict(plan.resolve(list(modules)))
    done: set[str] = set()
    for container in dict.fromkeys(parent_name(name) for name in resolved):
        styles = {name.rpartition(".")[2]: rule for name, rule in resolved.items() if parent_name(name) == container}
        used = _place_whole(result, container, modules[container], styles)
        for name in used:
            full_name = join(container, name)
            result.styles[full_name] = dataclasses.replace(result.styles[full_name], rule=styles[name].pattern)
        result.attribute_to(", ".join(styles[name].pattern for name in used))
        done.update(join(container, name) for name in used)
    assign_rules(result, modules, [(name, rule) for name, rule in resolved.items() if name not in done])


def _place_whole(
    result: Assignments, name: str, module: nn.Module, styles: Mapping[str, _plan.Rule]
) -> tuple[str, ...]:
    """Place a module's layers together, if they are an attention or an MLP; the names of those that were."""

    def are(layers: tuple[str, ...], *wanted: str) -> bool:
        return [styles[layer].style if layer in styles else "" for layer in layers] == list(wanted)

    projections = attention.find_attention(module)
    if projections is not None and are(projections, "column", "column", "column", "row"):
        reason = attention.place_attention(result, name, module, projections)
        if reason is not None:
            raise ValueError(
                f"plan='huggingface' cuts the heads of {shown(name)}, but {reason}; take another tensor-parallel size, "
                "or pass 'auto', which leaves what does not divide whole."
            )
        return (
            *projections,
            *(norm for norm in styles if join(name, norm) in result.styles and norm not in projections),
        )
    parts = mlp_parts.find_by_name(module)
    if parts is not None and are(parts.children, *("column" for _ in parts.columns), "row"):
        reason = place_mlp(result, name, module, parts)
        return () if reason is not None else parts.children
    return ()
