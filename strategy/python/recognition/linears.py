"""Determines which modules are linear or embedding layers that a style can shard, and along which dims."""

from __future__ import annotations

from torch import nn

from weft.strategy.recognition.linear_subclasses import computes_linear
from weft.strategy.sharding.state import original_class, state_of

COLUMN_STYLES = ("column", "column_gather_output")
ROW_STYLES = ("row", "row_split_input")
ADAPTED = "_weft_adapted"  # an attribute of a layer whose adapters are hidden: see `recognition.adapters`


def is_conv1d(module: nn.Module) -> bool:
    """Return whether a module is, by the name of its class, GPT-2's Conv1D: a linear layer with a weight [in, out]."""
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    return (
        original_class(module).__name__ == "Conv1D"
        and not isinstance(module, nn.Conv1d)
        and weight is not None
        and weight.dim() == 2
        and bias is not None
        and bias.dim() == 1
        and bias.shape[0] == weight.shape[1]
        and isinstance(getattr(module, "nf", None), int)
    )


def why_no_linear(module: nn.Module) -> str | None:
    """Return why a column or row style cannot take over this module's forward; None if it can."""
    cls = original_class(module)
    if not isinstance(module, nn.Linear):
        return None if is_conv1d(module) and "forward" not in module.__dict__ else f"it is a {cls.__name__}"
    if "weight" not in module._parameters:
        return "its weight is parametrized"
    if "forward" in module.__dict__:
        return f"{cls.__name__} has a forward of its own"
    extra = sorted(
        name for name, value in module._parameters.items() if value is not None and name not in ("weight", "bias")
    )
    if extra:
        return f"it has more parameters: {', '.join(extra)}"
    below = [name for name, child in module.named_modules() if name and any(True for _ in child.parameters())]
    if below:
        return f"it has modules of its own: {', '.join(below)}"
    if cls.forward is not nn.Linear.forward and not computes_linear(module):
        return f"{cls.__name__} has a forward of its own, which computes something else than nn.Linear"
    return None


def why_not_fusable(module: nn.Module) -> str | None:
    """Return why a linear layer cannot be included in a fused operator; None if it can."""
    cls = original_class(module)
    if cls is not nn.Linear and not is_conv1d(module):
        return f"it is a {cls.__name__}, not an nn.Linear"
    reason = why_no_linear(module)
    if reason is not None:
        return reason
    if ADAPTED in module.__dict__:
        return "it has adapters"
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return "it has hooks" if any(hooks) else None


def why_no_vocab_embedding(module: nn.Module) -> str | None:
    """Return why vocab_embedding cannot take over this module's forward; None if it can."""
    cls = original_class(module)
    if not isinstance(module, nn.Embedding):
        return f"it is a {cls.__name__}"
    if "weight" not in module._parameters:
        return "its weight is parametrized"
    if "forward" in module.__dict__ or not (cls.forward is nn.Embedding.forward or _calls_super(cls)):
        return f"{cls.__name__} has a forward of its own"
    if module.max_norm is not None:
        return f"it uses max_norm={module.max_norm}"
    for option in ("scale_grad_by_freq", "sparse"):
        if getattr(module, option):
            return f"it uses {option}=True"
    return None


def _calls_super(cls: type[nn.Module]) -> bool:
    """Return whether a class's forward calls `super().forward`, for example to scale the result.

    A forward that also reads the weight itself raises when it runs: torch does not mix DTensors with plain tensors.
    """
    code = getattr(cls.forward, "__code__", None)
    return code is not None and "__class__" in code.co_freevars and "forward" in code.co_names


def shard_dims(module: nn.Module, style: str) -> dict[str, int]:
    """Return, by name, the dims along which a style shards parameters of a module; other parameters are replicated."""
    state = state_of(module)
    transposed = state.transposed if state is not None else is_conv1d(module)
    if style in COLUMN_STYLES or style == "vocab_head":
        return {"weight": 1 if transposed else 0, "bias": 0}
    if style in ROW_STYLES:
        return {"weight": 0 if transposed else 1}
    if style == "gather_weights":
        parameters = {name: p for name, p in module._parameters.items() if p is not None}
        return {name: longest_dim(p) for name, p in parameters.items() if is_worth_gathering(p)}
    if style == "experts":
        return dict.fromkeys((name for name, p in module._parameters.items() if p is not None), 0)
    return {"weight": 0} if style == "vocab_embedding" else {}


def is_worth_gathering(parameter: nn.Parameter) -> bool:
    """Return whether a parameter has two or more dims: sharding a vector saves too little memory for an all-gather."""
    return parameter.dim() >= 2


def longest_dim(parameter: nn.Parameter) -> int:
    return max(range(parameter.dim()), key=lambda dim: (parameter.shape[dim], -dim))


def features(module: nn.Module) -> tuple[int, int]:
    """Return (in, out) of a linear layer."""
    weight = module._parameters["weight"]
    assert weight is not None
    rows, columns = weight.shape
    return (rows, columns) if is_conv1d(module) else (columns, rows)
