"""plan="auto": recognises MLPs, attention blocks, embeddings and output layers, and shards what it can verify.

Linear layers are recognised by the dataflow of the forward (`weft.strategy.verification`): layers whose outputs reach
only one other layer, the sink, form a group with it. They are sharded by column and the sink by row, if the code before
the sink computes the same on one rank's features; otherwise weights are sharded and activations gathered, which is
exact for any code. Modules that can neither be called nor be recognised by their names stay replicated, and the report
gives the reason. Logits are gathered, because their use is unknown.
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from weft.strategy.experts.layer import state_of_experts
from weft.strategy.experts.lists import ExpertList
from weft.strategy.experts.recognition import layout_of, why_not_sharded
from weft.strategy.modules.activation_checkpointing import repeated_blocks
from weft.strategy.recognition import attention, mlp_layers, probe
from weft.strategy.recognition.adapters import has_adapted_parameter
from weft.strategy.recognition.assignments import Assignment, Assignments, assign_gate_up_mlp, assign_mlp, join
from weft.strategy.recognition.linears import features, is_worth_gathering, why_no_linear, why_no_vocab_embedding
from weft.strategy.sharding.remote_layers import RemoteLayer, is_copy
from weft.strategy.sharding.state import MlpLayers, child_of
from weft.strategy.verification.decide import Decision
from weft.strategy.verification.evidence import Evidence, assign_gathered, assign_group

_MIN_ROWS_PER_RANK = 4
_MIN_FRACTION = 1 / 500  # of all parameters; smaller layers outside of groups stay replicated
_NOT_TOKEN_EMBEDDINGS = re.compile(r"pos|wpe|type|segment|bias|relative")


def assign_auto(
    model: nn.Module, tp_size: int, verify: str = "auto", example: Any = None, *, shards_sequence: bool = False
) -> Assignments:
    """Return the styles for a model's modules.

    Args:
        verify, example: as in `weft.strategy.Plan`.
        shards_sequence: whether the plan also shards activations along the sequence.

    Raises:
        ValueError: nothing to shard was found, with tp_size > 1.
    """
    evidence = Evidence(model, tp_size, verify, example)
    result = Assignments(tp_size, remarks=evidence.remarks())
    result.unread_aliases = _unread_biases(model, evidence)
    num_holders = _num_holders(model, result.unread_aliases)
    claimed: set[int] = set()
    unassigned: dict[str, str] = {}
    skipped = 0
    for name, module in model.named_modules():
        if id(module) in claimed:
            continue
        if isinstance(module, ExpertList):
            skipped += 1
            claimed.update(id(inner) for inner in module.modules())
            continue
        if any(isinstance(p, DTensor) for p in module.parameters(recurse=False)):
            skipped += 1
            if state_of_experts(module) is None:  # else parallelize_experts has sharded it
                result.notes.append(f"{name}: skipped: its parameters are DTensors already")
            continue
        if has_adapted_parameter(module):
            result.keep_replicated(name, "PEFT adapts one of its parameters")
            claimed.update(id(inner) for inner in module.modules())
            continue
        used = (
            _assign_experts(result, name, module)
            or _assign_mlp(result, name, module, num_holders, unassigned, evidence)
            or _assign_embedding(result, model, name, module, num_holders, evidence)
        )
        claimed.update(id(layer) for layer in used)
    if tp_size > 1:
        _assign_heads_of_other_stages(result, model, num_holders, evidence, claimed)
        claimed.update(id(model.get_submodule(name)) for name in result.styles)
        _assign_groups(result, model, num_holders, evidence, claimed, shards_sequence)
    else:
        _assign_by_names(result, model, claimed)
    for name, reason in unassigned.items():
        if not any(other == name or other.startswith(f"{name}." if name else "") for other in result.styles):
            result.keep_replicated(name, reason)
    result.record_rule("auto")
    if tp_size > 1 and not any(a.style != "replicate" for a in result.styles.values()) and not skipped:
        if any(isinstance(module, RemoteLayer) for module in model.modules()):  # other stages may have layers to shard
            result.keep_replicated("", "nothing to shard on this pipeline stage")
            return result
        reasons = f" ({'; '.join(result.notes)})" if result.notes else ""
        raise ValueError(
            f"plan='auto' found nothing to shard in a {type(model).__name__}{reasons}: it shards linear layers and "
            "embeddings that the forward calls; use strategy='weft_fsdp' (or tensor_parallel_size=1), which shards "
            "any parameter, pipeline_cuts, or a plan of rules that names modules."
        )
    return result


def _assign_heads_of_other_stages(
    result: Assignments, model: nn.Module, num_holders: dict[int, int], evidence: Evidence, claimed: set[int]
) -> None:
    """Shard output layers like the embedding of another pipeline stage that they are tied to: by rows of the weight."""
    for name, module in model.named_modules():
        if id(module) in claimed or why_no_linear(module) is not None or not is_copy(module, "weight"):
            continue
        rows = features(module)[1]
        has_enough_rows = rows >= _MIN_ROWS_PER_RANK * result.tp_size
        is_used_as_layer = evidence.is_called(module) and not evidence.is_read(module)
        if has_enough_rows and is_used_as_layer and _is_output_layer(module, rows, num_holders):
            result.styles[name] = Assignment("column_gather_output")


def _assign_by_names(result: Assignments, model: nn.Module, claimed: set[int]) -> None:
    """Assign styles to attention by its layers' names, for the report of one rank, on which every style is exact."""
    for name, module in model.named_modules():
        names = attention.find_attention(module) or attention.find_fused_attention(module)
        layers = () if names is None else tuple(module._modules[layer] for layer in names)
        if names is None or any(id(layer) in claimed or _has_dtensors(layer) for layer in layers):
            continue
        if len(names) == 4:
            attention.assign_attention(result, name, module, names)
        elif attention.why_no_linears(module, names) is None:
            result.styles[join(name, names[0])] = Assignment("column_gather_output")
            result.styles[join(name, names[1])] = Assignment("row_split_input")


def _assign_groups(
    result: Assignments,
    model: nn.Module,
    num_holders: dict[int, int],
    evidence: Evidence,
    claimed: set[int],
    shards_sequence: bool,
) -> None:
    """Assign styles to linear layers outside of MLPs: groups, attention recognised by its names, single layers."""

    siblings_of_dtensors = {
        id(child) for m in model.modules() if any(map(_has_dtensors, m.children())) for child in m.children()
    }

    def is_free(layer: nn.Module) -> bool:
        """Return whether a layer may get a style. A sibling of DTensors may not: its input may be sharded already."""
        return id(layer) not in claimed and id(layer) not in siblings_of_dtensors and not _is_tied(layer, num_holders)

    for decision in evidence.decisions(is_free):
        used = _try_to_fuse(result, model, decision, evidence) or assign_group(result, decision)
        claimed.update(id(model.get_submodule(name)) for name in used)
    for name, module in model.named_modules():
        claimed.update(id(layer) for layer in _assign_attention(result, name, module, num_holders, evidence, claimed))
    # With a sharded sequence, a layer between the groups of a block computes on this rank's tokens, and is replicated.
    singles = set(_modules_outside_blocks(model)) if shards_sequence else None
    total = sum(p.numel() for p in model.parameters())
    for name, module in model.named_modules():
        if not is_free(module) or name in result.styles or (singles is not None and name not in singles):
            continue
        if why_no_linear(module) is None and evidence.is_called(module) and not evidence.is_read(module):
            _assign_single(result, name, module, total)
        elif _has_large_weights(module, total) and evidence.is_covered(module):
            result.styles[name] = Assignment("gather_weights", "gathered for its forward")


def _try_to_fuse(result: Assignments, model: nn.Module, decision: Decision, evidence: Evidence) -> list[str]:
    """Assign a group the fused style and return the names of its layers; empty if its forward cannot be fused."""
    container, group = model.get_submodule(decision.container), decision.group
    if len(group.sources) > 2 or any("." in layer for layer in (*group.sources, group.sink)):
        return []
    gate = group.sources[0] if len(group.sources) == 2 else None
    mlp = MlpLayers(gate, group.sources[-1], group.sink)
    if probe.why_not_fused(container, mlp) is not None:
        return []
    found = result.find_activation(container, mlp, evidence.input_shapes(container))
    if isinstance(found, str):
        return []
    result.fuse(decision.container, container, *found, False)
    return [*decision.sources, decision.sink]


def _has_large_weights(module: nn.Module, total: int) -> bool:
    """Return whether a module has large weights of its own, as nn.MultiheadAttention has.

    False for convolutions, RNNs and embeddings. `total`: the number of elements of all of the model's parameters.
    """
    own = [p for p in module._parameters.values() if p is not None and is_worth_gathering(p)]
    is_excluded = isinstance(module, (nn.modules.conv._ConvNd, nn.RNNBase, nn.Embedding))
    return not is_excluded and sum(p.numel() for p in own) >= _MIN_FRACTION * total


def _assign_single(result: Assignments, name: str, layer: nn.Module, total: int) -> None:
    """Shard a layer outside of groups by column, with a gathered output, if it is large enough."""
    _, out = features(layer)
    weight = layer._parameters["weight"]
    assert weight is not None
    if weight.numel() < _MIN_FRACTION * total or out < _MIN_ROWS_PER_RANK * result.tp_size:
        return
    result.styles[name] = Assignment("column_gather_output", "gathered, because the code uses its full output")


def _holders(model: nn.Module) -> dict[int, list[tuple[str, nn.Module]]]:
    """Return, by the id of each parameter, (the parameter's name, the module that holds it) for each holder."""
    holders: dict[int, list[tuple[str, nn.Module]]] = {}
    for module_name, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                holders.setdefault(id(parameter), []).append((join(module_name, name), module))
    return holders


def _num_holders(model: nn.Module, unread: set[str]) -> dict[int, int]:
    """Return the number of names of each parameter, by its id, without counting the names in `unread`."""
    return {key: sum(name not in unread for name, _ in holders) for key, holders in _holders(model).items()}


def _unread_biases(model: nn.Module, evidence: Evidence) -> set[str]:
    """Return the names of biases that modules hold but do not read, because a linear layer elsewhere holds them, too.

    BERT's head holds the bias of its output layer in this way. Modules that verification could not run may read the
    bias, so names in these modules are left out.
    """
    unread: set[str] = set()
    for holders in _holders(model).values():
        layers = [(name, module) for name, module in holders if why_no_linear(module) is None]
        others = [(name, module) for name, module in holders if why_no_linear(module) is not None]
        if not others or len(layers) != 1 or not layers[0][0].endswith("bias") or evidence.tp_size == 1:
            continue
        layer = layers[0][1]
        is_unread = evidence.is_called(layer) and not evidence.is_read(layer)
        if is_unread and all(evidence.is_covered(module) and not evidence.is_called(module) for _, module in others):
            unread.update(name for name, _ in others)
    return unread


def _is_tied(module: nn.Module, num_holders: dict[int, int]) -> bool:
    return any(num_holders[id(parameter)] > 1 for parameter in module.parameters())


def _has_dtensors(module: nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


def _layers(module: nn.Module, names: tuple[str, ...]) -> list[nn.Module]:
    return [child_of(module, name) for name in names]


def _assign_experts(result: Assignments, name: str, module: nn.Module) -> list[nn.Module]:
    layout = layout_of(module)
    if layout is None:
        return []
    reason = why_not_sharded(module, layout, result.tp_size)
    if reason is None:
        result.styles[name] = Assignment("experts")
    else:
        result.keep_replicated(name, reason)
    return list(module.modules())


def _assign_mlp(
    result: Assignments,
    name: str,
    module: nn.Module,
    num_holders: dict[int, int],
    unassigned: dict[str, str],
    evidence: Evidence,
) -> list[nn.Module]:
    mlp = mlp_layers.find_by_name(module)
    gate_up_layers = mlp_layers.find_gate_up(module) if mlp is None else None
    names = gate_up_layers if mlp is None else mlp.children
    if names is None:
        return []
    layers = _layers(module, names)
    if any(_has_dtensors(layer) for layer in layers):
        return []
    if any(_is_tied(layer, num_holders) for layer in layers):
        result.keep_replicated(name, "a weight of its MLP is tied to another module's")
    elif gate_up_layers is not None:
        assign_gate_up_mlp(result, name, gate_up_layers)
    else:
        assert mlp is not None
        reason = assign_mlp(result, name, module, mlp, evidence.input_shapes(module))
        if reason is not None:
            unassigned[name] = reason
            return []  # the search for groups assigns them
    return layers


def _assign_attention(
    result: Assignments,
    name: str,
    module: nn.Module,
    num_holders: dict[int, int],
    evidence: Evidence,
    claimed: set[int],
) -> list[nn.Module]:
    """Assign styles to an attention that is recognised by its layers' names and is in no group.

    Returns the layers that are done, with a style or kept replicated; [] if there are none.
    """
    names = attention.find_attention(module) or attention.find_fused_attention(module)
    if names is None:
        return []
    layers = _layers(module, names)
    if any(_has_dtensors(layer) or id(layer) in claimed for layer in layers):
        return []
    if any(_is_tied(layer, num_holders) for layer in layers):
        result.keep_replicated(name, "a weight of its projections is tied to another module's")
    elif any(evidence.is_read(layer) for layer in layers):
        return []  # `_assign_groups` assigns each layer by itself
    elif evidence.mode == "never" and len(names) == 4:
        reason = attention.assign_attention(result, name, module, names)
        if reason is not None:
            result.keep_replicated(name, reason)
    else:
        reason = attention.why_no_linears(module, names)
        if reason is not None and all(evidence.is_covered(layer) for layer in layers):
            return []  # `_assign_groups` assigns each layer by itself
        if reason is not None:
            result.keep_replicated(name, reason)
            return layers
        are_called = all(evidence.is_called(layer) for layer in layers)
        reason = "its projections are in no group of layers" if are_called else evidence.why_unknown(name)
        *sources, sink = (join(name, layer) for layer in names)
        assign_gathered(result, tuple(sources), sink, name, reason)
    return layers


def _assign_embedding(
    result: Assignments,
    model: nn.Module,
    name: str,
    module: nn.Module,
    num_holders: dict[int, int],
    evidence: Evidence,
) -> list[nn.Module]:
    if not isinstance(module, nn.Embedding) or _NOT_TOKEN_EMBEDDINGS.search(name.rpartition(".")[2]):
        return []
    rows = module.num_embeddings
    holders = {n: m for n, m in model.named_modules() if m._parameters.get("weight") is module.weight}
    output_layers = [
        n for n in _modules_outside_blocks(model) if _is_output_layer(model.get_submodule(n), rows, num_holders)
    ]
    reason = why_no_vocab_embedding(module)
    if reason is None and rows < _MIN_ROWS_PER_RANK * result.tp_size:
        reason = f"{rows} rows are too few for {result.tp_size} ranks"
    if reason is None and not output_layers and not _is_only_called(module, evidence):
        reason = f"there is no output layer of {rows} features, so code may compute logits with its weight"
    if reason is None and num_holders[id(module.weight)] > len(holders):
        reason = "its weight is tied to a parameter of another name, which would need the same shards"
    for holder, other in holders.items():
        if reason is None and holder not in output_layers and why_no_vocab_embedding(other) is not None:
            reason = f"its weight is tied to that of '{holder}', which cannot be sharded in the same way"
    if reason is not None:
        result.keep_replicated(name, reason)
        return [module]
    result.styles |= {holder: Assignment("vocab_embedding") for holder in holders if holder not in output_layers}
    for layer in output_layers:
        is_tied = num_holders[id(model.get_submodule(layer)._parameters["weight"])] > 1
        if layer in holders or not is_tied:
            result.styles.setdefault(layer, Assignment("column_gather_output"))
    return [module]


def _is_only_called(table: nn.Module, evidence: Evidence) -> bool:
    return evidence.tp_size > 1 and evidence.is_called(table) and not evidence.is_read(table)


def _modules_outside_blocks(model: nn.Module) -> list[str]:
    """Return names of modules outside of repeated blocks and nn.MultiheadAttention, which reads its layers' weights."""
    inside = (*repeated_blocks(model), *(n for n, m in model.named_modules() if isinstance(m, nn.MultiheadAttention)))
    return [n for n, _ in model.named_modules() if not any(n.startswith(f"{each}.") for each in inside)]


def _is_output_layer(module: nn.Module, rows: int, num_holders: dict[int, int]) -> bool:
    """Return whether a module is a linear layer without DTensors, with `rows` output features and no tied bias."""
    if why_no_linear(module) is not None or _has_dtensors(module) or features(module)[1] != rows:
        return False
    bias = module._parameters["bias"]
    return bias is None or num_holders[id(bias)] == 1
