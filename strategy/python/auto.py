"""plan="auto": recognises MLPs, attention blocks, embeddings and output layers, and shards what it can verify.

What it is not sure of it leaves replicated, and says why in the report. Logits are gathered, as nobody knows what is
done to them.
"""

from __future__ import annotations

import re

from torch import nn
from torch.distributed.tensor import DTensor

from weft.strategy import attention, mlp_parts
from weft.strategy.activation_checkpointing import repeated_blocks
from weft.strategy.assignments import Assignment, Assignments, place_fused_mlp, place_mlp
from weft.strategy.linears import features, why_no_linear, why_no_vocab_embedding

_MIN_ROWS_PER_RANK = 4
_NO_TOKENS = re.compile(r"pos|wpe|type|segment|bias|relative")
_LAYERS_BY_CALL = (nn.TransformerEncoderLayer.forward, nn.TransformerDecoderLayer.forward)


def assign_auto(model: nn.Module, tp_size: int) -> Assignments:
    """The styles for a model's modules.

    Raises:
        ValueError: nothing to shard was found, with tp_size > 1.
    """
    result = Assignments(tp_size)
    owners = _owners(model)
    claimed: set[int] = set()
    skipped = 0
    for name, module in model.named_modules():
        if id(module) in claimed:
            continue
        if any(isinstance(p, DTensor) for p in module.parameters(recurse=False)):
            skipped += 1
            result.notes.append(f"{name}: skipped: its parameters are DTensors already")
            continue
        for place in (_place_mlp, _place_attention, _place_embedding):
            used = place(result, model, name, module, owners)
            claimed.update(id(part) for part in used)
    result.attribute_to("auto")
    if tp_size > 1 and not any(a.style != "replicate" for a in result.styles.values()) and not skipped:
        reasons = f" ({'; '.join(result.notes)})" if result.notes else ""
        raise ValueError(
            f"plan='auto' found nothing to shard in a {type(model).__name__}{reasons}: it looks for linear layers "
            f"named {mlp_parts.NAMES_LOOKED_FOR}, for Sequential(Linear, activation, Linear) and for attention "
            f"projections named {attention.NAMES_LOOKED_FOR}; pass a plan of rules."
        )
    return result


def _owners(model: nn.Module) -> dict[int, int]:
    """How many (module, name) pairs hold each parameter, by its id."""
    counts: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                counts[id(parameter)] = counts.get(id(parameter), 0) + 1
    return counts


def _is_tied(module: nn.Module, owners: dict[int, int]) -> bool:
    return any(owners[id(parameter)] > 1 for parameter in module.parameters())


def _has_dtensors(module: nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


def _layers(module: nn.Module, names: tuple[str, ...]) -> list[nn.Module]:
    return [module._modules[name] for name in names]


def _place_mlp(
    result: Assignments, model: nn.Module, name: str, module: nn.Module, owners: dict[int, int]
) -> list[nn.Module]:
    parts = mlp_parts.find_by_name(module)
    fused = mlp_parts.find_fused(module) if parts is None else None
    if parts is None and fused is None:
        return []
    layers = _layers(module, parts.children if fused is None else fused)
    if any(_has_dtensors(layer) for layer in layers):
        return []
    if any(_is_tied(layer, owners) for layer in layers):
        result.leave(name, "a weight of its MLP is tied to another module's")
    elif fused is not None:
        place_fused_mlp(result, name, fused)
    elif type(module).forward in _LAYERS_BY_CALL:
        result.split_layers(name, parts, f"inside a {type(module).__name__}")
    else:
        reason = place_mlp(result, name, module, parts)
        if reason is not None:
            result.leave(name, reason)
    return layers


def _place_attention(
    result: Assignments, model: nn.Module, name: str, module: nn.Module, owners: dict[int, int]
) -> list[nn.Module]:
    if isinstance(module, nn.MultiheadAttention):
        result.leave(name, "an nn.MultiheadAttention keeps query, key and value in one weight")
        return list(module.children())
    projections = attention.find_attention(module)
    fused = attention.find_fused_attention(module) if projections is None else None
    if projections is None and fused is None:
        return []
    layers = _layers(module, projections or fused)
    if any(_has_dtensors(layer) for layer in layers):
        return []
    if any(_is_tied(layer, owners) for layer in layers):
        reason: str | None = "a weight of its projections is tied to another module's"
    elif fused is not None:
        reason = attention.place_fused_attention(result, name, module, fused)
    else:
        reason = attention.place_attention(result, name, module, projections)
    if reason is not None:
        result.leave(name, reason)
    return layers


def _place_embedding(
    result: Assignments, model: nn.Module, name: str, module: nn.Module, owners: dict[int, int]
) -> list[nn.Module]:
    if not isinstance(module, nn.Embedding) or _NO_TOKENS.search(name.rpartition(".")[2]):
        return []
    rows = module.num_embeddings
    holders = {n: m for n, m in model.named_modules() if m._parameters.get("weight") is module.weight}
    heads = [n for n in _outside_of_blocks(model) if _gives(model.get_submodule(n), rows, owners)]
    reason = why_no_vocab_embedding(module)
    if reason is None and rows < _MIN_ROWS_PER_RANK * result.tp_size:
        reason = f"{rows} rows are too few for {result.tp_size} ranks"
    if reason is None and not heads:
        reason = f"no output layer of {rows} features, so its weight may be read as one"
    if reason is None and owners[id(module.weight)] > len(holders):
        reason = "its weight is tied to a parameter of another name, which would need the same shards"
    for holder, other in holders.items():
        if reason is None and holder not in heads and why_no_vocab_embedding(other) is not None:
            reason = f"its weight is tied to that of '{holder}', which cannot be cut in the same way"
    if reason is not None:
        result.leave(name, reason)
        return [module]
    result.styles |= {holder: Assignment("vocab_embedding") for holder in holders if holder not in heads}
    for head in heads:
        is_tied = owners[id(model.get_submodule(head)._parameters["weight"])] > 1
        if head in holders or not is_tied:
            result.styles.setdefault(head, Assignment("column_gather_output"))
    return [module]


def _outside_of_blocks(model: nn.Module) -> list[str]:
    """The modules that are called once, beside those inside an nn.MultiheadAttention, which reads their weights."""
    inside = (*repeated_blocks(model), *(n for n, m in model.named_modules() if isinstance(m, nn.MultiheadAttention)))
    return [n for n, _ in model.named_modules() if not any(n.startswith(f"{each}.") for each in inside)]


def _gives(module: nn.Module, rows: int, owners: dict[int, int]) -> bool:
    """Whether it is a layer of plain weights, with a bias of its own, if any, and as many output features."""
    if why_no_linear(module) is not None or _has_dtensors(module) or features(module)[1] != rows:
        return False
    bias = module._parameters["bias"]
    return bias is None or owners[id(bias)] == 1
