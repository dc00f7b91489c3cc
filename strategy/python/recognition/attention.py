"""Recognises attention blocks, and the attributes that count their heads, by names."""

from __future__ import annotations

from torch import nn

from weft.strategy.recognition.assignments import Assignment, Assignments, join
from weft.strategy.recognition.linears import features, why_no_linear
from weft.strategy.sharding.state import child_of

# (query, key, value, output) by the names in existing models.
_NAMES = (
    ("wq", "wk", "wv", "wo"),
    ("q_proj", "k_proj", "v_proj", "o_proj"),
    ("q_proj", "k_proj", "v_proj", "out_proj"),
    ("q_proj", "k_proj", "v_proj", "dense"),
)
NAMES_LOOKED_FOR = ", ".join("/".join(names) for names in _NAMES)
# (query, key and value in one layer; output).
_FUSED_NAMES = (
    ("c_attn", "c_proj"),
    ("qkv_proj", "o_proj"),
    ("query_key_value", "dense"),
    ("Wqkv", "out_proj"),
    ("qkv", "proj"),
)
_HEAD_NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm", "query_layernorm", "key_layernorm")
_QUERY_COUNTS = ("n_heads", "num_heads", "n_head", "num_attention_heads", "n_local_heads")
_KEY_COUNTS = ("n_kv_heads", "num_kv_heads", "num_key_value_heads", "n_local_kv_heads")
_HEAD_DIMS = ("head_dim", "attention_head_size", "head_size", "d_head", "dim_head", "d_k")

# An attribute counts heads if its name is in _COUNT_NAMES, or contains one of _COUNT_WORDS and none of _PER_HEAD_WORDS.
_COUNT_WORDS = ("head", "kv_groups")
_COUNT_NAMES = ("h", "nh", "nheads", "nhead", "n_h", "num_h", "kv", "n_kv")
_PER_HEAD_WORDS = ("dim", "size", "hidden", "channels", "width")


def counts_heads(attribute: str) -> bool:
    """Return whether an attribute counts heads, by its name."""
    lower = attribute.lower().strip("_")
    is_count = any(word in lower for word in _COUNT_WORDS) and not any(word in lower for word in _PER_HEAD_WORDS)
    return is_count or lower in _COUNT_NAMES


def find_attention(module: nn.Module) -> tuple[str, str, str, str] | None:
    """Return the names of the query, key, value and output layers among a module's children."""
    for names in _NAMES:
        if all(module._modules.get(name) is not None for name in names):
            return names
    return None


def find_fused_attention(module: nn.Module) -> tuple[str, str] | None:
    """Return the names of the layer that is query, key and value in one, and of the output layer."""
    for names in _FUSED_NAMES:
        if all(module._modules.get(name) is not None for name in names):
            return names
    return None


def why_no_linears(module: nn.Module, layers: tuple[str, ...]) -> str | None:
    """Return why the layers of an attention cannot be sharded; None if they can."""
    for layer in layers:
        reason = why_no_linear(child_of(module, layer))
        if reason is not None:
            return f"'{layer}': {reason}"
    return None


def assign_attention(
    result: Assignments, name: str, module: nn.Module, projections: tuple[str, str, str, str]
) -> str | None:
    """Give the projections column and row styles and divide the head counts; return why not, if they do not fit."""
    reason = _why_not_by_heads(module, projections, result.tp_size)
    if reason is not None:
        return reason
    for projection in projections:
        style = "row" if projection == projections[-1] else "column"
        result.styles[join(name, projection)] = Assignment(style, container=name)
    for norm in _head_norms(module, projections):
        result.styles[join(name, norm)] = Assignment("replicate_sum_gradients", "each rank uses it for its own heads")
    counts = _counts(module, (*_QUERY_COUNTS, *_KEY_COUNTS))
    if counts:
        result.counts[name] = {attribute: count // result.tp_size for attribute, count in counts.items()}
    return None


def _counts(module: nn.Module, attributes: tuple[str, ...]) -> dict[str, int]:
    values = {name: module.__dict__.get(name) for name in attributes}
    return {name: value for name, value in values.items() if type(value) is int and value > 0}


def _head_norms(module: nn.Module, projections: tuple[str, str, str, str]) -> list[str]:
    """Return the names of the children that normalize each head's query or key, with weights that all heads share."""
    sizes = _counts(module, (*_QUERY_COUNTS, *_HEAD_DIMS))
    query = features(child_of(module, projections[0]))[1]
    head_dim = next((sizes[name] for name in _HEAD_DIMS if name in sizes), None)
    num_heads = next((sizes[name] for name in _QUERY_COUNTS if name in sizes), None)
    head_dim = head_dim or (query // num_heads if num_heads else None)
    norms = [name for name in _HEAD_NORMS if module._modules.get(name) is not None]
    return [n for n in norms if all(tuple(p.shape) == (head_dim,) for p in child_of(module, n).parameters())]


def _why_not_by_heads(module: nn.Module, projections: tuple[str, str, str, str], tp_size: int) -> str | None:
    layers = [child_of(module, name) for name in projections]
    reason = why_no_linears(module, projections)
    if reason is not None:
        return reason
    norms = [child_of(module, norm) for norm in _head_norms(module, projections)]
    known_ids = {id(p) for layer in (*layers, *norms) for p in layer.parameters()}
    extra = [name for name, parameter in module.named_parameters() if id(parameter) not in known_ids]
    if extra:
        return f"it has more parameters than its projections: {', '.join(extra)}"
    reason = why_heads_do_not_divide(module, projections, tp_size)
    if reason is None and _num_heads(module, features(layers[0])[1]) is None:
        reason = f"it has no int attribute that counts its heads ({', '.join(_QUERY_COUNTS)})"
    if reason is None and features(layers[3])[0] % tp_size:
        reason = f"'{projections[3]}' takes {features(layers[3])[0]} features, which do not divide by {tp_size}"
    return reason


def _num_heads(module: nn.Module, query_features: int) -> int | None:
    """Return the number of heads: an attribute, else query_features // head size; None without either attribute.

    A module without an attribute that counts heads usually calls view(..., -1, head_dim), which fits a rank's heads. If
    its code reads the count from a config instead, the count is not divided, and the view raises a shape error.
    """
    counts = _counts(module, (*_QUERY_COUNTS, *_KEY_COUNTS))
    num_heads = next((counts[name] for name in _QUERY_COUNTS if name in counts), None)
    head_dim = next(iter(_counts(module, _HEAD_DIMS).values()), None)
    return query_features // head_dim if num_heads is None and head_dim is not None else num_heads


def why_heads_do_not_divide(module: nn.Module, projections: tuple[str, ...], tp_size: int) -> str | None:
    """Return why the heads of separate query, key and value layers do not divide by `tp_size`.

    None: they divide, or no attribute tells their number.
    """
    query, key, value = (features(child_of(module, name))[1] for name in projections[:3])
    counts = _counts(module, (*_QUERY_COUNTS, *_KEY_COUNTS))
    for attribute, count in counts.items():
        if count % tp_size:
            return f"{attribute}={count} does not divide by {tp_size}"
    num_heads = _num_heads(module, query)
    if num_heads is None:
        return None
    if num_heads == 0 or query % num_heads:
        return f"its {query} query features do not divide by its number of heads, {num_heads}"
    head_dim = query // num_heads
    for what, size in (("query", query), ("key", key)):
        if size % head_dim or (size // head_dim) % tp_size:
            return f"its {size / head_dim:g} {what} heads do not divide by {tp_size}"
    return f"its {value} value features do not divide by {tp_size}" if value % tp_size else None
