"""plan="huggingface": converts the tensor-parallel plans of Hugging Face's models to weft's styles."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from weft.strategy import _plan
from weft.strategy.experts.recognition import find_experts
from weft.strategy.planning.plan_text import HUGGING_FACE_STYLES
from weft.strategy.planning.rules import assign_rules
from weft.strategy.recognition import attention, mlp_layers
from weft.strategy.recognition.adapters import is_of_peft
from weft.strategy.recognition.assignments import Assignments, assign_mlp, display_name, join, parent_name
from weft.strategy.recognition.linears import why_no_linear
from weft.strategy.verification.evidence import Evidence, assign_gathered, assign_group


def style_of(pattern: str, value: str) -> str:
    """Return weft's style for Hugging Face's `value`; raises ValueError if weft has no such style."""
    style = HUGGING_FACE_STYLES.get(value, value)
    if style in _plan.STYLES:
        return style
    raise ValueError(
        f"plan: Hugging Face's plan gives '{pattern}' the style '{value}', which weft does not have; pass a plan of "
        "rules, or 'auto'."
    )


def assign_hugging_face(model: nn.Module, tp_size: int, verify: str = "auto", example: Any = None) -> Assignments:
    """Return the styles for the Hugging Face models inside `model`; `model` may itself be a Hugging Face model.

    Attention and MLPs are recognised as with "auto", so that heads are verified and fitting MLPs fused. Activations
    between layers with column and row rules are sharded where verification finds the same column and row layers, and
    everywhere with verify="never"; elsewhere they are gathered. A rule that matches no module gets a note in the
    report: a plan may be for a family of models.

    Args:
        verify, example: as in `weft.strategy.Plan`.

    Raises:
        ValueError: no plan was found, a plan has a style that weft does not have, a number of heads is not divisible by
            `tp_size`, or a rule does not fit its module (`assign_rules`).
    """
    plans = dict(_plans_inside(model))
    if not plans:
        raise ValueError(
            "plan='huggingface' finds no model with a plan of its own (tp_plan, or base_model_tp_plan of its config) "
            f"in a {type(model).__name__}; pass 'auto' or a plan of rules."
        )
    modules = dict(model.named_modules(remove_duplicate=False))
    evidence = Evidence(model, tp_size, verify, example)
    result = Assignments(tp_size, remarks=evidence.remarks())
    # Adapters of PEFT are not in the patterns.
    experts = {name.replace(".base_layer", ""): layout for name, layout in find_experts(model).items()}
    of_experts = [join(name, each) for name, layout in experts.items() for each in layout.names]
    for name, values in plans.items():
        rules = []
        for pattern, value in values.items():
            if any(_plan.matches(join(name, pattern), parameter) for parameter in of_experts):
                continue  # the rule for the module shards its parameters
            rule = _plan.Rule(join(name, pattern), style_of(pattern, value))
            if any(_plan.matches(rule.pattern, module) for module in modules):
                rules.append(rule)
            else:
                result.notes.append(f"{rule.pattern}: this pattern of Hugging Face's plan matches no module")
        _assign(result, modules, _plan.Plan(rules), evidence)
    return result


def _plans_inside(model: nn.Module) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Yield (name, plan) of the outermost modules that have a plan; its patterns are relative to the module.

    A wrapper, such as one of PEFT, may show the plan of the model inside as its own: of modules with equal plans, those
    count whose modules the patterns match.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    plans = {name: plan for name, module in model.named_modules() if (plan := _plan_of(module))}
    outer: list[str] = []
    for name, plan in plans.items():
        if any(not above or name.startswith(f"{above}.") for above in outer):
            continue
        prefix = f"{name}." if name else ""
        is_shown_again = any(other != name and other.startswith(prefix) and plans[other] == plan for other in plans)
        if is_shown_again and not any(_plan.matches(join(name, pattern), m) for pattern in plan for m in modules):
            continue
        outer.append(name)
        yield name, plan


def _plan_of(module: nn.Module) -> dict[str, str]:
    """Return the plan in a module or its config, from pattern to Hugging Face's style; {}: there is none."""
    config = module.__dict__.get("config")
    base_plan: Any = getattr(config, "base_model_tp_plan", None)
    own_plan: Any = getattr(module, "tp_plan", None) or getattr(module, "_tp_plan", None)
    if isinstance(own_plan, Mapping) and own_plan:
        return dict(own_plan)
    if not (isinstance(base_plan, Mapping) and base_plan):
        return {}
    prefix = getattr(module, "base_model_prefix", "")
    base_name = prefix if prefix in module._modules else ""  # the plan's patterns are names in the base model
    return {join(base_name, pattern): value for pattern, value in base_plan.items()}


def _assign(result: Assignments, modules: Mapping[str, nn.Module], plan: _plan.Plan, evidence: Evidence) -> None:
    resolved = dict(plan.resolve(list(modules)))
    done: set[str] = set()
    for container in dict.fromkeys(parent_name(name) for name in resolved):
        rules = {name.rpartition(".")[2]: rule for name, rule in resolved.items() if parent_name(name) == container}
        layers = _assign_mlp(result, container, modules[container], rules, evidence)
        done.update(_record_rules(result, resolved, layers))
    style_by_id = {id(modules[name]): rule.style for name, rule in resolved.items() if name not in done}
    for decision in evidence.decisions(lambda layer: style_by_id.get(id(layer)) in ("column", "row")):
        source_styles = {style_by_id[id(modules[name])] for name in decision.sources}
        if source_styles == {"column"} and style_by_id[id(modules[decision.sink])] == "row":
            _check_heads(decision.container, modules[decision.container], evidence.tp_size)
            done.update(_record_rules(result, resolved, assign_group(result, decision)))
    for container in dict.fromkeys(parent_name(name) for name in resolved):
        rules = {name.rpartition(".")[2]: rule for name, rule in resolved.items() if parent_name(name) == container}
        names = attention.find_attention(modules[container])
        if names is None or not _have_styles(rules, names, "column", "column", "column", "row"):
            continue
        if attention.why_no_linears(modules[container], names) is not None:
            continue
        layers = [join(container, name) for name in names]
        if done.isdisjoint(layers):
            done.update(
                _record_rules(
                    result, resolved, _assign_attention_by_names(result, container, modules[container], names, evidence)
                )
            )
    rest = []
    for name, rule in resolved.items():
        if is_of_peft(modules[name]):
            result.keep_replicated(name, f"PEFT has put a {type(modules[name]).__name__} in its place")
        elif name not in done:
            rest.append((name, rule))
    assign_rules(
        result,
        modules,
        [(name, _with_gathered_activations(rule, modules[name], evidence)) for name, rule in rest],
        evidence,
    )


def _record_rules(result: Assignments, resolved: Mapping[str, _plan.Rule], used: Iterable[str]) -> list[str]:
    """Record each used layer's pattern in its assignment, and all these patterns in the other new assignments.

    Returns:
        The used layers that have a rule.
    """
    used = list(used)
    patterns = [resolved[name].pattern for name in used if name in resolved]
    for name in used:
        if name in resolved:
            result.styles[name] = dataclasses.replace(result.styles[name], rule=resolved[name].pattern)
    result.record_rule(", ".join(dict.fromkeys(patterns)))
    return [name for name in used if name in resolved]


def _have_styles(rules: Mapping[str, _plan.Rule], layers: tuple[str, ...], *expected: str) -> bool:
    """Return whether the rules of these layers have the expected styles, in this order."""
    return [rules[layer].style if layer in rules else "" for layer in layers] == list(expected)


def _assign_mlp(
    result: Assignments, name: str, module: nn.Module, rules: Mapping[str, _plan.Rule], evidence: Evidence
) -> list[str]:
    """Assign styles to an MLP with column and row rules; return the full names of its layers, [] without styles."""
    mlp = mlp_layers.find_by_name(module)
    if mlp is None or not _have_styles(rules, mlp.children, *("column" for _ in mlp.column_layers), "row"):
        return []
    reason = assign_mlp(result, name, module, mlp, evidence.input_shapes(module))
    return [] if reason is not None else [join(name, child) for child in mlp.children]


def _assign_attention_by_names(
    result: Assignments, name: str, module: nn.Module, names: tuple[str, str, str, str], evidence: Evidence
) -> list[str]:
    """Assign styles to an attention recognised by its names; return the names of the modules that get one.

    On one rank, or with verify="never", it is sharded by heads if that fits; otherwise its activations are gathered.
    """
    _check_heads(name, module, evidence.tp_size)
    layers = [join(name, layer) for layer in names]
    if evidence.tp_size == 1 or evidence.mode == "never":
        reason = attention.assign_attention(result, name, module, names)
        if reason is None:
            return [*layers, *(n for n in result.styles if parent_name(n) == name and n not in layers)]
    assign_gathered(result, tuple(layers[:-1]), layers[-1], name, evidence.why_unknown(name))
    return layers


def _check_heads(name: str, module: nn.Module, tp_size: int) -> None:
    names = attention.find_attention(module)
    if names is None or attention.why_no_linears(module, names) is not None:
        return
    reason = attention.why_heads_do_not_divide(module, names, tp_size)
    if reason is not None:
        raise ValueError(
            f"plan='huggingface' shards {display_name(name)} by heads, but {reason}; use another tensor-parallel "
            "size, or pass 'auto', which gathers activations where the number of heads is not divisible."
        )


def _with_gathered_activations(rule: _plan.Rule, module: nn.Module, evidence: Evidence) -> _plan.Rule:
    """Return a linear layer's column or row rule with the style that gathers activations, which is exact for any code.

    Other rules, and all rules with verify="never", do not change.
    """
    style = {"column": "column_gather_output", "row": "row_split_input"}.get(rule.style)
    if style is None or why_no_linear(module) is not None or evidence.mode == "never":
        return rule
    return _plan.Rule(rule.pattern, style)
