"""Finds the modules that compute on a shard of the sequence, for plans with sequence_parallel (option or style)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from weft.strategy.modules.activation_checkpointing import repeated_blocks
from weft.strategy.planning.sequence_experts import check_experts, routers_of, sharded_experts
from weft.strategy.recognition.adapters import collapsed, hidden_adapters
from weft.strategy.recognition.assignments import AdaptedLayer, Assignment, Assignments, join, parent_name
from weft.strategy.recognition.linears import COLUMN_STYLES, ROW_STYLES, features
from weft.strategy.sharding.sequence_region import Region, SequenceRole

_SHARDED_BY_FEATURES = (*COLUMN_STYLES, *ROW_STYLES)
_SHARDED_IN_CONTAINER = ("column_row_mlp", "attention")  # rules that give such styles to layers inside
_TOKEN_STATISTICS = ("BatchNorm", "GroupNorm", "InstanceNorm")  # they compute statistics over tokens


def assign_sequence_roles(model: nn.Module, assignments: Assignments, group_name: str) -> dict[int, SequenceRole]:
    """Return the role of each module, by its id, in the repeated blocks whose sequence the plan shards.

    In a pipeline, these are the blocks of this rank's stages; there may be none if other ranks have some.

    Raises:
        ValueError: there is no such block, or one has modules that cannot work on a shard of the tokens.
    """
    with hidden_adapters(model) as adapted:
        roles = _roles(model, collapsed(assignments), group_name)
    for layer in adapted.values():
        _assign_adapter_roles(roles, model, layer)
    return roles


def _roles(model: nn.Module, assignments: Assignments, group_name: str) -> dict[int, SequenceRole]:
    roles: dict[int, SequenceRole] = {}
    found = _find_blocks(model)
    stage_of = found.stage_of
    for blocks in _runs(stage_of, assignments):
        region = Region(group_name)
        block_roles: dict[int, SequenceRole] = {}
        has_experts = any(sharded_experts(model, assignments.styles, block) for block in blocks)
        for i, block in enumerate(blocks):
            _assign_block_roles(block_roles, model, assignments, block, region)
            # Values cross the boundary between two stages with all tokens, as in the recorded forward.
            is_first = i == 0 or stage_of[blocks[i - 1]] != stage_of[block]
            is_last = block == blocks[-1] or stage_of[blocks[i + 1]] != stage_of[block]
            dim = _features_into(model, assignments, block)
            role = SequenceRole(region, "block", dim, is_first, is_last, has_experts)
            block_roles[id(model.get_submodule(block))] = role
        _check_in_one_run(block_roles.keys() & roles.keys(), model)
        roles |= block_roles
    if not roles:
        if _may_shard_elsewhere(found.elsewhere, assignments):
            return roles
        raise ValueError(
            "sequence_parallel=True finds no repeated blocks with layers that the plan shards, between which "
            "activations would be sharded along the sequence; leave it out, or put the blocks into an nn.ModuleList."
        )
    _check_not_shared(roles, model)
    _check_named(roles, model, assignments)
    return roles


def _assign_adapter_roles(roles: dict[int, SequenceRole], model: nn.Module, layer: AdaptedLayer) -> None:
    """Give the adapters of a layer roles that fit the layer's own.

    A column layer's A gets all tokens, and its gradient comes from this rank's rows of B; a row layer's B, and both of
    a layer that is not sharded, get this rank's tokens. So the gradients of these are sums over the ranks.
    """
    role = roles.get(id(model.get_submodule(layer.base)))
    if role is None:
        return
    summed = dataclasses.replace(role, kind="sharded")
    for a, b in layer.factors:
        roles[id(model.get_submodule(a))] = role if role.kind == "scatters" else summed
        roles[id(model.get_submodule(b))] = role if role.kind == "inside" else summed
    if role.kind == "sharded":
        for dropout in layer.dropouts:
            roles[id(model.get_submodule(dropout))] = dataclasses.replace(role, kind="dropout")


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """The repeated blocks of a model.

    stage_of: the pipeline stage of each block on this rank, by the block's name: 0 without a pipeline; None: the layers
        of the block are on several stages.
    elsewhere: the names of the blocks on other ranks of the pipeline.
    """

    stage_of: dict[str, int | None]
    elsewhere: tuple[str, ...] = ()


def _find_blocks(model: nn.Module) -> _Blocks:
    from weft.strategy.pipeline.staged_model import find_staged
    from weft.strategy.pipeline.stages import ANY_STAGE

    found = find_staged(model)
    if found is None:
        return _Blocks(dict.fromkeys(repeated_blocks(model), 0))
    prefix, staged = found
    layers = {join(prefix, name): stage for name, stage in staged.layers.stage_of.items()}
    blocks = {
        block: next((stage for name, stage in layers.items() if f"{block}.".startswith(f"{name}.")), None)
        for block in (join(prefix, name) for name in staged.blocks)
    }
    elsewhere = tuple(block for block, stage in blocks.items() if stage not in (None, ANY_STAGE, *staged.stages))
    stage_of = {block: stage for block, stage in blocks.items() if block not in elsewhere}
    # Modules outside of the divided module run on its last stage.
    outside = [block for block in repeated_blocks(model) if prefix and not f"{block}.".startswith(f"{prefix}.")]
    return _Blocks(stage_of | dict.fromkeys(outside, staged.layers.num_stages - 1), elsewhere)


def _may_shard_elsewhere(blocks: Sequence[str], assignments: Assignments) -> bool:
    """Return whether the plan shards layers of blocks on other ranks; with a preset, the plan may do so."""
    styles = assignments.styles_elsewhere
    if styles is None:
        return len(blocks) > 0
    sharding = (*_SHARDED_BY_FEATURES, *_SHARDED_IN_CONTAINER)
    names = [name for name, style in styles.items() if style in sharding]
    return any(name.startswith(f"{block}.") for block in blocks for name in names)


def _runs(stage_of: Mapping[str, int | None], assignments: Assignments) -> list[list[str]]:
    """Return runs of adjacent blocks of one list that the plan shards; blocks between two runs get all tokens.

    A run may continue over several pipeline stages of this rank, and over blocks of other ranks. A block whose layers
    are on several stages is in no run.
    """
    runs: list[list[str]] = []
    previous_parent = None
    for block, stage in stage_of.items():
        if stage is None or not _is_sharded(block, assignments):
            previous_parent = None
            continue
        if parent_name(block) != previous_parent:
            runs.append([])
        runs[-1].append(block)
        previous_parent = parent_name(block)
    return runs


def _is_sharded(block: str, assignments: Assignments) -> bool:
    if assignments.styles.get(block, Assignment("")).style == "column_row_mlp":
        return False  # the block itself is an MLP, as in a list of experts: there is nothing around its layers
    return any(a.style in (*_SHARDED_BY_FEATURES, "column_row_mlp") for a in _inside(assignments, block).values())


def _check_in_one_run(ids_in_two_runs: set[int], model: nn.Module) -> None:
    """Raise ValueError for a module in two runs of blocks: its role has the sequence lengths of one run only."""
    name = next((name for name, module in model.named_modules() if id(module) in ids_in_two_runs), None)
    if name is not None:
        raise ValueError(
            f"sequence_parallel=True: '{name}' is one module in blocks that do not follow each other in one list, and "
            "which may get different numbers of tokens; use separate modules, or leave sequence parallelism out."
        )


def _check_not_shared(roles: dict[int, SequenceRole], model: nn.Module) -> None:
    """Raise ValueError for a module that is both inside and outside of the blocks.

    Outside, the module gets all tokens and full gradients, which would wrongly be summed over the ranks.
    """
    blocks = _sharded_blocks(roles, model)
    for name, module in model.named_modules(remove_duplicate=False):
        if id(module) in roles and not f"{name}.".startswith(blocks):
            raise ValueError(
                f"sequence_parallel=True: '{name}' is also a layer of the repeated blocks, where it gets a shard of "
                "the tokens, but here it gets all tokens; use two modules, or leave sequence parallelism out."
            )


def _sharded_blocks(roles: dict[int, SequenceRole], model: nn.Module) -> tuple[str, ...]:
    """Return the names of the blocks between which tokens are sharded, each followed by a dot."""
    ids = {module for module, role in roles.items() if role.kind == "block"}
    return tuple(f"{name}." for name, module in model.named_modules(remove_duplicate=False) if id(module) in ids)


def _check_named(roles: dict[int, SequenceRole], model: nn.Module, assignments: Assignments) -> None:
    """Check the modules with the style sequence_parallel.

    A module outside of the blocks, which gets all tokens, is noted for the report. Raises ValueError for a module that
    is inside another one that computes on all tokens.
    """
    blocks = _sharded_blocks(roles, model)
    for name in (name for name, a in assignments.styles.items() if a.style == "sequence_parallel"):
        role = roles.get(id(model.get_submodule(name)))
        if role is not None and role.kind in ("sharded", "dropout"):
            continue
        if name.startswith(blocks):
            raise ValueError(
                f"parallelize: '{name}' gets the style 'sequence_parallel', but is inside a module that computes on "
                "all tokens; remove its rule."
            )
        assignments.notes.append(f"'{name}': computes on all tokens, as it is in none of the blocks that are sharded")


def _inside(assignments: Assignments, block: str) -> dict[str, Assignment]:
    return {name: a for name, a in assignments.styles.items() if name.startswith(f"{block}.")}


def _features_into(model: nn.Module, assignments: Assignments, name: str) -> int:
    """Return the number of input features of the first column layer inside a module."""
    columns = (layer for layer, a in _inside(assignments, name).items() if a.style in COLUMN_STYLES)
    return features(model.get_submodule(next(columns)))[0]


def _assign_block_roles(
    roles: dict[int, SequenceRole], model: nn.Module, assignments: Assignments, block: str, region: Region
) -> None:
    check_experts(model, block, region.group_name)
    styles = _inside(assignments, block)
    gathering = {
        parent_name(name) for name, a in styles.items() if a.style in _SHARDED_BY_FEATURES and a.fused_into is None
    }
    fused = {name for name, a in styles.items() if a.style == "column_row_mlp"}
    for container in gathering:
        kinds = {a.style for name, a in styles.items() if parent_name(name) == container}
        if container == block or kinds.isdisjoint(COLUMN_STYLES) or kinds.isdisjoint(ROW_STYLES):
            raise ValueError(
                f"sequence_parallel=True: '{container}' has layers that the plan shards, but is not a module inside a "
                "block that holds column layers and their row layer; leave sequence parallelism out."
            )
    whole = {name for name in gathering if _needs_whole(model, styles, name)}
    in_whole = tuple(f"{name}." for name in whole)
    for name in (*gathering, *fused):
        if not name.startswith(in_whole):
            kind = "fused" if name in fused else "whole" if name in whole else "gathers"
            roles[id(model.get_submodule(name))] = SequenceRole(region, kind, _features_into(model, assignments, name))
    for name, a in styles.items():
        if a.style in _SHARDED_BY_FEATURES and not name.startswith(in_whole):
            roles[id(model.get_submodule(name))] = SequenceRole(
                region, "inside" if a.style in COLUMN_STYLES else "scatters"
            )
    containers = {*gathering, *fused}
    experts = {n for n in sharded_experts(model, styles, block) if not n.startswith(tuple(f"{c}." for c in containers))}
    roles |= {id(model.get_submodule(name)): SequenceRole(region, "experts") for name in experts}
    named = {name for name, a in styles.items() if a.style == "sequence_parallel"} | routers_of(model, experts)
    _assign_other_roles(roles, model.get_submodule(block), block, {*containers, *experts}, named, region)


def _needs_whole(model: nn.Module, styles: Mapping[str, Assignment], container: str) -> bool:
    """Return whether a module computes by more than column layers of its input and their row layer.

    It may have linear layers that the plan leaves replicated, as in an attention with latent keys and values, or
    experts. Parts of their gradients are then full on each rank, so that a reduce-scatter would sum them wrongly.
    """
    inside = [name for name, _ in model.get_submodule(container).named_modules(prefix=container)]
    linears = [name for name in inside if isinstance(model.get_submodule(name), nn.Linear)]
    is_replicated = any(name not in styles or styles[name].style == "replicate" for name in linears)
    return is_replicated or len(sharded_experts(model, styles, container)) > 0


def _assign_other_roles(
    roles: dict[int, SequenceRole],
    parent: nn.Module,
    parent_path: str,
    containers: set[str],
    named: set[str],
    region: Region,
) -> None:
    """Assign roles to the modules between sharded layers, which get this rank's tokens.

    Modules in `named` are not checked, because a rule gives them the style sequence_parallel.
    """
    for key, module in parent.named_children():
        name, cls = f"{parent_path}.{key}", type(module).__name__
        if name in containers:
            continue
        if name in named:
            for inner in module.modules():
                roles[id(inner)] = SequenceRole(region, "dropout" if isinstance(inner, nn.Dropout) else "sharded")
        elif isinstance(module, nn.Dropout):
            roles[id(module)] = SequenceRole(region, "dropout")
        elif ("Norm" in cls and not any(each in cls for each in _TOKEN_STATISTICS)) or isinstance(module, nn.Linear):
            roles[id(module)] = SequenceRole(region, "sharded")
        elif any(container.startswith(f"{name}.") for container in containers):
            _check_no_parameters(module.parameters(recurse=False), name, cls)
            _assign_other_roles(roles, module, name, containers, named, region)
        else:
            _check_no_parameters(module.parameters(), name, cls)
            _assign_other_roles(roles, module, name, containers, named, region)


def _check_no_parameters(parameters: Iterable[nn.Parameter], name: str, cls: str) -> None:
    if next(iter(parameters), None) is not None:
        raise ValueError(
            f"sequence_parallel=True: '{name}', a {cls}, is left unsharded by the plan and may need all tokens, but "
            "each rank would have only a shard of them; give it rules that shard it, or the style "
            "'sequence_parallel' if it treats each token by itself, or leave sequence parallelism out."
        )
