"""Summarises a parallelized model in a few sentences: how modules are sharded, and which parameters are replicated."""

from __future__ import annotations

from collections import Counter

from torch import nn
from torch.distributed.tensor import DTensor

from weft.strategy.experts.layer import state_of_experts
from weft.strategy.recognition.assignments import parent_name
from weft.strategy.recognition.linears import COLUMN_STYLES, ROW_STYLES
from weft.strategy.sharding.state import ModuleState, state_of

MAX_LINES = 12  # of a start message: those of `summary`, and those that callers add
REPLICATED_FRACTION = 0.05  # of the bytes; above it, replicated parameters are named
_MAX_KINDS = 5
_MAX_LAYERS = 3  # layers of one parent that are named; if there are more, only the class of the parent is named
_STYLE_TEXTS = {
    "column_row_mlp": "fused, by hidden units",
    "vocab_embedding": "by rows",
    "vocab_head": "by classes, logits not gathered",
    "gather_weights": "with weights gathered for each forward",
    "experts": "by experts",
}


def summary(model: nn.Module) -> list[str]:
    """Return at most 3 lines on a parallelized model: kinds of sharded modules, and parameters that stay replicated."""
    return [*_kinds(model), *replicated_lines(model)]


def _kinds(model: nn.Module) -> list[str]:
    """Return a line with the number of sharded modules by class and sharding; [] without sharded modules."""
    modules = dict(model.named_modules())
    groups: dict[str, dict[str, str]] = {}  # by parent: the styles of its layers
    sharded: set[str] = set()
    counts: Counter[tuple[str, str]] = Counter()
    counts.update((kind, _STYLE_TEXTS["experts"]) for kind in _expert_kinds(model))
    for name, module in modules.items():
        state = state_of(module)
        if state is None or state.is_layer_of_fused:
            continue
        if state.style in (*_STYLE_TEXTS, *COLUMN_STYLES, *ROW_STYLES):
            sharded.add(name)
        if state.style in _STYLE_TEXTS:
            counts[_kind(state), _STYLE_TEXTS[state.style]] += 1
        elif state.style in (*COLUMN_STYLES, *ROW_STYLES):
            groups.setdefault(parent_name(name), {})[name] = state.style
    for name, layers in groups.items():
        parent = state_of(modules[name])
        kind = type(modules[name]).__name__ if parent is None else _kind(parent)
        inside = f"{name}." if name else ""
        has_more = any(other != name and other.startswith(inside) for other in sharded - {*layers})
        if has_more and len(layers) <= _MAX_LAYERS:  # the module as a whole is sharded in several ways
            kind = f"{', '.join(layer.rpartition('.')[2] for layer in layers)} of {kind}"
        counts[kind, _group_text(set(layers.values()))] += 1
    texts = [f"{count} {kind} {how}" for (kind, how), count in counts.most_common(_MAX_KINDS)]
    rest = sum(count for _, count in counts.most_common()[_MAX_KINDS:])
    texts += [f"{rest} of other kinds"] if rest else []
    return [f"sharded: {'; '.join(texts)}."] if texts else []


def expert_lines(model: nn.Module) -> list[str]:
    """Return a line on the modules whose experts are sharded over expert-parallel ranks; [] if there are none."""
    kinds = Counter(_expert_kinds(model))
    texts = [f"{count} {kind} {_STYLE_TEXTS['experts']}" for kind, count in kinds.items()]
    return [f"sharded: {'; '.join(texts)}."] if texts else []


def _expert_kinds(model: nn.Module) -> list[str]:
    states = (state_of_experts(module) for module in model.modules())
    return [state.original_class.__name__ for state in states if state is not None]


def _kind(state: ModuleState) -> str:
    return state.original_class.__name__


def _group_text(styles: set[str]) -> str:
    if styles <= {"column", "row"}:
        return "by heads or hidden units"
    if styles <= {"column_gather_output", "row_split_input"}:
        return "with gathered activations"
    return "in part with gathered activations"


def replicated_lines(model: nn.Module) -> list[str]:
    """Return a line on the replicated parameters, and above 5 % of the bytes one with the largest three."""
    parameters = list(model.named_parameters())
    full = [(name, p.nbytes) for name, p in parameters if _is_full(p)]
    total, full_bytes = sum(p.nbytes for _, p in parameters), sum(size for _, size in full)
    if not total:
        return []
    lines = [
        f"replicated: {len(full)} of {len(parameters)} parameters, {100 * full_bytes / total:.1f} % of their bytes."
    ]
    if full_bytes > REPLICATED_FRACTION * total:
        largest = sorted(full, key=lambda each: -each[1])[:3]
        named = ", ".join(f"'{name}' {size / 1e6:.3f} MB" for name, size in largest)
        lines.append(f"largest replicated: {named}.")
    return lines


def replicated_fraction(model: nn.Module) -> float:
    """Return the fraction of a model's bytes that every rank holds in full, 0 to 1."""
    parameters = list(model.parameters())
    return sum(p.nbytes for p in parameters if _is_full(p)) / max(1, sum(p.nbytes for p in parameters))


def _is_full(parameter: nn.Parameter) -> bool:
    return not isinstance(parameter, DTensor) or parameter._local_tensor.numel() == parameter.numel()
