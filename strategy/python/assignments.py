"""What a plan comes to on one model: a style for each module, before anything is changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from torch import nn
from torch.distributed.tensor import DTensor

from weft.strategy import _plan, mlp_parts, probe
from weft.strategy.linears import why_no_linear, why_no_vocab_embedding
from weft.strategy.roles import refuse_fsdp_children
from weft.strategy.state import MlpParts


@dataclasses.dataclass(frozen=True)
class Assignment:
    """The style of one module. `fused_into` names the MLP whose operator a layer is a part of; `recompute` is its.

    `rule`: the pattern that gave it, or "auto".
    """

    style: str
    note: str = ""
    mlp: MlpParts | None = None
    activation: str = ""
    fused_into: str | None = None
    recompute: bool = False
    rule: str = ""


@dataclasses.dataclass
class Assignments:
    """Styles by module name, head counts to divide by (module, attribute), and what was left alone and why."""

    tp_size: int
    styles: dict[str, Assignment] = dataclasses.field(default_factory=dict)
    heads: dict[tuple[str, str], int] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)

    def leave(self, module_name: str, reason: str) -> None:
        self.notes.append(f"{shown(module_name)}: left replicated: {reason}")

    def divide_heads(self, module_name: str, attribute: str, num_heads: int) -> None:
        """Note that an attribute is to be divided; ValueError when it does not divide."""
        _plan.check_heads(module_name, attribute, num_heads, self.tp_size)
        self.heads[module_name, attribute] = num_heads // self.tp_size

    def attribute_to(self, rule: str) -> None:
        """Note which rule has given the styles that came since the last note."""
        for name, assignment in self.styles.items():
            if not assignment.rule:
                self.styles[name] = dataclasses.replace(assignment, rule=rule)

    def split_layers(self, container_name: str, parts: MlpParts, note: str) -> None:
        for child in parts.children:
            style = "row" if child == parts.down else "column"
            self.styles[join(container_name, child)] = Assignment(style, note)

    def fuse(self, container_name: str, parts: MlpParts, activation: str, recompute: bool) -> None:
        note = f"{activation}, {'gated' if parts.gate is not None else 'plain'}{', recompute' if recompute else ''}"
        self.styles[container_name] = Assignment("column_row_mlp", note, parts, activation, recompute=recompute)
        for child in parts.children:
            style = "row" if child == parts.down else "column"
            self.styles[join(container_name, child)] = Assignment(style, note, fused_into=container_name)


def join(module_name: str, child: str) -> str:
    return f"{module_name}.{child}" if module_name else child


def shown(module_name: str) -> str:
    return f"'{module_name}'" if module_name else "the model itself"


def parent_name(module_name: str) -> str:
    return module_name.rpartition(".")[0]


def place_mlp(
    result: Assignments, name: str, container: nn.Module, parts: MlpParts, recompute: bool = False
) -> str | None:
    """Give an MLP the fused style, or column and row to its layers; the reason when neither is right.

    Raises:
        ValueError: `recompute` is asked of one that cannot be fused.
    """
    reason = probe.why_not_fused(container, parts)
    if reason is None:
        found = probe.find_activation(container, parts)
        if not isinstance(found, str):
            result.fuse(name, *found, recompute)
            return None
        reason = found
    if recompute:
        raise ValueError(
            f"parallelize: the rule for {shown(name)} says recompute, which only the fused operator can do, and "
            f"it cannot be fused: {reason}; remove recompute from the rule."
        )
    not_split = probe.why_not_split(container, parts)
    if not_split is None:
        result.split_layers(name, parts, f"not fused: {reason}")
    return not_split


def assign_explicit(model: nn.Module, plan: _plan.Plan, tp_size: int) -> Assignments:
    """The styles that a plan of rules gives to a model's modules.

    Raises:
        ValueError: a rule does not fit the model, naming the module and the remedy.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    result = Assignments(tp_size)
    for name, rule in plan.resolve(list(modules)):
        module = modules[name]
        _refuse_dtensors(name, module, rule.style)
        _ASSIGN[rule.style](result, name, module, rule)
        result.attribute_to(rule.pattern or '""')
        if rule.heads is not None:
            _divide(result, modules[parent_name(name)], parent_name(name), rule.heads, name)
        holder = modules.get(parent_name(name)) if name else None
        if rule.style != "replicate" and isinstance(holder, nn.MultiheadAttention):
            raise ValueError(
                f"parallelize: '{name}' is a layer of an nn.MultiheadAttention, which reads its weight without calling "
                "it; leave it out of the plan, or use an attention of separate query, key and value layers."
            )
    _refuse_two_styles(modules, result)
    return result


def _refuse_dtensors(name: str, module: nn.Module, style: str) -> None:
    if style == "column_row_mlp":
        refuse_fsdp_children(name, module)
    for parameter_name, parameter in module.named_parameters(recurse=style == "column_row_mlp"):
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"parallelize: the rule for {shown(name)} hits '{join(name, parameter_name)}', which is a DTensor "
                "already; remove the rule, or parallelize first and shard over other axes afterwards."
            )


def _refuse_two_styles(modules: dict[str, nn.Module], result: Assignments) -> None:
    first: dict[int, str] = {}
    for name, module in modules.items():
        other = first.setdefault(id(module), name)
        styles = [result.styles.get(n, Assignment("")).style for n in (other, name)]
        if styles[0] != styles[1]:
            raise ValueError(
                f"parallelize: '{other}' and '{name}' are one module but get the styles '{styles[0] or 'none'}' and "
                f"'{styles[1] or 'none'}'; give both names the same one."
            )


def _divide(result: Assignments, parent: nn.Module, module_name: str, attribute: str, layer: str) -> None:
    value = getattr(parent, attribute, None)
    if not isinstance(value, int) or isinstance(value, bool):
        found = f"is {value!r}" if hasattr(parent, attribute) else "does not exist"
        raise ValueError(
            f"parallelize: the rule for '{layer}' counts heads in the attribute '{attribute}' of {shown(module_name)}, "
            f"which {found}; name an int attribute of that module."
        )
    result.divide_heads(module_name, attribute, value)


def _assign_linear(result: Assignments, name: str, module: nn.Module, rule: _plan.Rule) -> None:
    reason = why_no_linear(module)
    if reason is not None:
        raise ValueError(
            f"parallelize: style '{rule.style}' wants an nn.Linear at {shown(name)}, but {reason}; "
            "use style 'replicate' or name the linear layers themselves."
        )
    result.styles[name] = Assignment(rule.style)


def _assign_embedding(result: Assignments, name: str, module: nn.Module, rule: _plan.Rule) -> None:
    reason = why_no_vocab_embedding(module)
    if reason is not None:
        raise ValueError(
            f"parallelize: style '{rule.style}' wants a plain nn.Embedding at {shown(name)}, but {reason}; "
            "use style 'replicate'."
        )
    result.styles[name] = Assignment(rule.style)


def _assign_mlp(result: Assignments, name: str, module: nn.Module, rule: _plan.Rule) -> None:
    parts = mlp_parts.find(module)
    if parts is None:
        children = ", ".join(f"{n} ({type(m).__name__})" for n, m in module.named_children()) or "none"
        raise ValueError(
            f"parallelize: style '{rule.style}' finds no MLP of two or three fitting nn.Linear layers among the "
            f"children of {shown(name)}, which are {children}; use column and row rules for its layers."
        )
    reason = place_mlp(result, name, module, parts, rule.recompute)
    if reason is not None:
        raise ValueError(
            f"parallelize: {shown(name)} cannot be sharded by its hidden units: {reason}; use style 'replicate'."
        )


def _assign_replicate(result: Assignments, name: str, module: nn.Module, rule: _plan.Rule) -> None:
    result.styles[name] = Assignment(rule.style)


_ASSIGN: dict[str, Callable[[Assignments, str, nn.Module, _plan.Rule], None]] = {
    "column": _assign_linear,
    "row": _assign_linear,
    "vocab_embedding": _assign_embedding,
    "column_row_mlp": _assign_mlp,
    "replicate": _assign_replicate,
}
