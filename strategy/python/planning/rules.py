"""Applies the rules of a plan to one model, or explains why they do not fit it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from weft.strategy import _plan
from weft.strategy.experts.layer import state_of_experts
from weft.strategy.experts.lists import ExpertList, why_list_not_sharded
from weft.strategy.experts.recognition import layout_of, why_not_sharded
from weft.strategy.experts.shards import is_expert
from weft.strategy.modules.activation_checkpointing import why_not_wrapped
from weft.strategy.modules.parallel_classes import check_no_fsdp_children
from weft.strategy.recognition import attention, mlp_layers, probe
from weft.strategy.recognition.assignments import (
    Assignment,
    Assignments,
    Options,
    assign_mlp,
    display_name,
    join,
    parent_name,
)
from weft.strategy.recognition.linears import why_no_linear, why_no_vocab_embedding
from weft.strategy.sharding.remote_layers import RemoteLayer, names_with_remote_layers
from weft.strategy.verification.evidence import Evidence, assign_gathered, assign_group
from weft.strategy.verification.fit import check_fit

_CONTAINER_STYLES = ("column_row_mlp", "attention", "experts", "sequence_parallel")
# Styles with which the module's own forward runs.
_STYLES_WITH_OWN_FORWARD = ("sequence_parallel", "replicate", "replicate_sum_gradients", "ignore")


def assign_explicit(
    model: nn.Module, plan: _plan.Plan, tp_size: int, verify: str = "auto", example: Any = None
) -> Assignments:
    """Return the styles that a plan of rules gives to a model's modules.

    Args:
        verify, example: as in `weft.strategy.Plan`.

    Raises:
        ValueError: a rule does not fit the model; the error names the module and the remedy.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    # Names of layers on other stages count too: a rule may match only there.
    rules = plan.resolve(names_with_remote_layers(model))
    present = {name for name, module in modules.items() if not isinstance(module, RemoteLayer)}
    evidence = Evidence(model, tp_size, verify, example)
    elsewhere = {name: rule.style for name, rule in rules if name not in present}
    result = Assignments(tp_size, remarks=evidence.remarks(), styles_elsewhere=elsewhere)
    assign_rules(result, modules, [(name, rule) for name, rule in rules if name in present], evidence)
    check_fit(result, model, evidence)
    return result


def assign_rules(
    result: Assignments, modules: Mapping[str, nn.Module], rules: Iterable[tuple[str, _plan.Rule]], evidence: Evidence
) -> None:
    """Give each named module the style of its rule; raises ValueError like `assign_explicit`."""
    for name, rule in rules:
        module = modules[name]
        if rule.style == "experts" and (state_of_experts(module) is not None or isinstance(module, ExpertList)):
            result.notes.append(f"{name}: its experts are sharded over the axis expert_parallel already")
            _record_options(result, name, module, rule)
            continue
        _check_no_dtensors(name, module, rule.style)
        if rule.style == "attention":
            _assign_attention(result, name, module, evidence)
        elif rule.style == "column_row_mlp":
            _assign_mlp(result, name, module, rule, evidence)
        elif rule.style == "experts" and isinstance(module, nn.ModuleList):
            _assign_list(result, name, modules[""], rule)
        else:
            _ASSIGN[rule.style](result, name, module, rule)
        _record_options(result, name, module, rule)
        result.record_rule(rule.pattern or '""')
        if rule.heads is not None:
            _divide_heads(result, modules[parent_name(name)], parent_name(name), rule.heads, name)
        holder = modules.get(parent_name(name)) if name else None
        if rule.style not in _STYLES_WITH_OWN_FORWARD and isinstance(holder, nn.MultiheadAttention):
            raise ValueError(
                f"parallelize: '{name}' is a layer of an nn.MultiheadAttention, which reads its weight without calling "
                "it; leave it out of the plan, or use an attention of separate query, key and value layers."
            )
    _check_one_style(modules, result)
    _check_no_offload_inside(result)


def _record_options(result: Assignments, name: str, module: nn.Module, rule: _plan.Rule) -> None:
    is_in_operator = result.styles.get(name, Assignment("")).recompute  # the fused operator recomputes by itself
    options = Options(rule.recompute and not is_in_operator, rule.offload, rule.precision or "", rule.pattern)
    if not str(options):
        return
    reason = why_not_wrapped(module)
    if reason is not None:
        raise ValueError(
            f"parallelize: the rule for {display_name(name)} says {options}, but {reason}; name the modules inside it."
        )
    result.options[name] = options


def _check_no_dtensors(name: str, module: nn.Module, style: str) -> None:
    if style == "ignore":
        return
    if style == "column_row_mlp":
        check_no_fsdp_children(name, module)
    is_container = style in _CONTAINER_STYLES or isinstance(module, ExpertList)
    for parameter_name, parameter in module.named_parameters(recurse=is_container):
        if is_expert(parameter):
            raise ValueError(
                f"parallelize: the rule for {display_name(name)} has the style {style!r}, but its experts are sharded "
                "over the axis expert_parallel already; give it the style 'experts', or leave out the rule or expert "
                "parallelism."
            )
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"parallelize: the rule for {display_name(name)} covers '{join(name, parameter_name)}', which is a "
                "DTensor already; remove the rule, or parallelize first and shard over other axes afterwards."
            )


def _check_one_style(modules: Mapping[str, nn.Module], result: Assignments) -> None:
    first_names: dict[int, str] = {}
    for name, module in modules.items():
        first = first_names.setdefault(id(module), name)
        styles = [result.styles.get(n, Assignment("")).style for n in (first, name)]
        if styles[0] != styles[1]:
            raise ValueError(
                f"parallelize: '{first}' and '{name}' are one module but get the styles '{styles[0] or 'none'}' and "
                f"'{styles[1] or 'none'}'; give both names the same style."
            )
        inherited = [
            dataclasses.replace(result.options.get(n, Options()), precision=result.precision_of(n))
            for n in (first, name)
        ]
        options = [str(each) for each in inherited]
        if options[0] != options[1]:
            raise ValueError(
                f"parallelize: '{first}' and '{name}' are one module but get the options '{options[0] or 'none'}' and "
                f"'{options[1] or 'none'}'; give both names the same options."
            )


def _check_no_offload_inside(result: Assignments) -> None:
    offloaded = [name for name, options in result.options.items() if options.offload and not options.recompute]
    for name in (name for name, options in result.options.items() if options.recompute):
        inside = next((n for n in offloaded if n.startswith(f"{name}." if name else "")), None)
        if inside is not None:
            raise ValueError(
                f"parallelize: the rule for '{inside}' says offload, which would keep activations that the recompute "
                f"of {display_name(name)} frees; leave out one of the two."
            )


def _divide_heads(result: Assignments, parent: nn.Module, module_name: str, attribute: str, layer: str) -> None:
    value = getattr(parent, attribute, None)
    if not isinstance(value, int) or isinstance(value, bool):
        found = f"is {value!r}" if hasattr(parent, attribute) else "does not exist"
        raise ValueError(
            f"parallelize: the rule for '{layer}' counts heads in the attribute '{attribute}' of "
            f"{display_name(module_name)}, which {found}; name an int attribute of that module."
        )
    result.divide_heads(module_name, attribute, value)


def _assign_row_split_input(result: Assignments, name: str, module: nn.Module, rule: _plan.Rule) -> None:
    if isinstance(module, nn.Embedding):  # torch's RowwiseParallel, too, shards the rows of the table
        _assign_embedding(result, name, module, _plan.Rule(rule.pattern, "vocab_embedding"))
    else:
        _assign_linear(result, name, module, rule)


def _assign_linear(result: Assignments, name: str, module: nn.Module, rule: _plan.Rule) -> None:
    reason = why_no_linear(module)
    if reason is not None:
        raise ValueError(
            f"parallelize: style '{rule.style}' wants an nn.Linear at {display_name(name)}, but {reason}; "
            "use style 'replicate' or name the linear layers themselves."
        )
    result.styles[name] = Assignment(rule.style)


def _assign_embedding(result: Assignments, name: str, module: nn.Module, rule: _plan.Rule) -> None:
    reason = why_no_vocab_embedding(module)
    if reason is not None:
        raise ValueError(
            f"parallelize: style '{rule.style}' wants a plain nn.Embedding at {display_name(name)}, but {reason}; "
            "use style 'replicate'."
        )
    result.styles[name] = Assignment(rule.style)


def _assign_mlp(result: Assignments, name: str, module: nn.Module, rule: _plan.Rule, evidence: Evidence) -> None:
    mlp = mlp_layers.find(module)
    if mlp is None:
        children = ", ".join(f"{n} ({type(m).__name__})" for n, m in module.named_children()) or "none"
        raise ValueError(
            f"parallelize: style '{rule.style}' finds no MLP of two or three fitting nn.Linear layers among the "
            f"children of {display_name(name)}, which are {children}; use column and row rules for its layers."
        )
    reason = assign_mlp(result, name, module, mlp, evidence.input_shapes(module), rule.recompute)
    if reason is None or evidence.tp_size == 1:
        return
    layers = {id(module._modules[child]) for child in mlp.children}
    for decision in evidence.decisions(lambda layer: id(layer) in layers):
        if decision.verdict.is_accepted:
            assign_group(result, decision, f"not fused: {probe.why_not_fused(module, mlp) or reason}")
            reason = None
    if reason is not None:
        raise ValueError(
            f"parallelize: {display_name(name)} cannot be sharded by its hidden units: {reason}; use "
            "column_gather_output and row_split_input for its layers, which keep activations full, or 'replicate'."
        )


def _assign_attention(result: Assignments, name: str, module: nn.Module, evidence: Evidence) -> None:
    names = attention.find_attention(module) or attention.find_fused_attention(module)
    inside = {id(layer) for layer in module.modules()}
    decisions = [each for each in evidence.decisions(lambda layer: id(layer) in inside) if each.container == name]
    reason = None if names is None else attention.why_no_linears(module, names)
    if names is not None and len(names) == 4 and reason is None:
        reason = attention.why_heads_do_not_divide(module, names, evidence.tp_size)
    if names is None and not decisions:
        children = ", ".join(f"{n} ({type(m).__name__})" for n, m in module.named_children()) or "none"
        reason = f"its children are {children}, of which none are projections named {attention.NAMES_LOOKED_FOR}"
    if reason is not None:
        raise ValueError(
            f"parallelize: style 'attention' cannot shard {display_name(name)} by heads: {reason}; use column and row "
            "rules for its layers, or style 'replicate'."
        )
    is_trusted = evidence.mode == "never" or evidence.tp_size == 1
    if is_trusted and names is not None and len(names) == 4 and not decisions:
        reason = attention.assign_attention(result, name, module, names)
        if reason is None:
            return
    if decisions:
        for decision in decisions:
            assign_group(result, decision)
        return
    *sources, sink = (join(name, layer) for layer in names or ())
    assign_gathered(result, tuple(sources), sink, name, reason or evidence.why_unknown(name))


def _assign_own_forward(result: Assignments, name: str, module: nn.Module, rule: _plan.Rule) -> None:
    result.styles[name] = Assignment(rule.style)


def _assign_experts(result: Assignments, name: str, module: nn.Module, rule: _plan.Rule) -> None:
    layout = layout_of(module)
    reason = "it has no parameters gate_up_proj and down_proj, [experts, ...], in the form of Transformers"
    if layout is not None:
        reason = why_not_sharded(module, layout, result.tp_size) or ""
    if reason:
        raise ValueError(
            f"parallelize: style 'experts' cannot shard {display_name(name)}: {reason}; use style 'replicate'."
        )
    result.styles[name] = Assignment(rule.style)


def _assign_list(result: Assignments, name: str, model: nn.Module, rule: _plan.Rule) -> None:
    reason = why_list_not_sharded(model, name, result.tp_size)
    if reason is not None:
        raise ValueError(
            f"parallelize: style 'experts' cannot shard {display_name(name)}: {reason}; or use style 'replicate'."
        )
    result.styles[name] = Assignment(rule.style)


_ASSIGN: dict[str, Callable[[Assignments, str, nn.Module, _plan.Rule], None]] = {
    "column": _assign_linear,
    "column_gather_output": _assign_linear,
    "row": _assign_linear,
    "row_split_input": _assign_row_split_input,
    "vocab_embedding": _assign_embedding,
    "vocab_head": _assign_linear,
    "experts": _assign_experts,
    "sequence_parallel": _assign_own_forward,
    "replicate": _assign_own_forward,
    "replicate_sum_gradients": _assign_own_forward,
    "ignore": _assign_own_forward,
}
