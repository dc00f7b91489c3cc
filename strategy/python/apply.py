"""parallelize: shards a plain nn.Module by a plan over a mesh, in place."""

from __future__ import annotations

import collections
import dataclasses
import sys
import warnings
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from weft.strategy._plan import shard_range
from weft.strategy.deferred import check_written, materialize, materialize_buffers
from weft.strategy.experts.layer import ExpertsState, route_own_tokens
from weft.strategy.experts.list_sharding import shard_list
from weft.strategy.experts.recognition import layout_of, num_experts_of
from weft.strategy.modules.activation_checkpointing import CheckpointedModule, WrappedForward, checkpoint_activations
from weft.strategy.modules.offload import offload_activations
from weft.strategy.modules.parallel_classes import set_parallel_class
from weft.strategy.plan import Plan, Rules
from weft.strategy.planning.sequence_parallel import assign_sequence_roles
from weft.strategy.recognition.adapters import has_adapted_parameter
from weft.strategy.recognition.assignments import Assignment, Assignments, join
from weft.strategy.recognition.linears import COLUMN_STYLES, ROW_STYLES, features, is_conv1d, shard_dims
from weft.strategy.recognition.recorded_outputs import keep_recorded_outputs
from weft.strategy.sharding.scopes import Scope
from weft.strategy.sharding.sequence_region import SequenceRole
from weft.strategy.sharding.shards import group_name_of, tensor_parallel_mesh, to_dtensor, to_plain
from weft.strategy.sharding.state import ModuleState, set_state, state_of
from weft.strategy.verification.evidence import drop_rehearsal


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: Rules | Plan,
    *,
    keeps_plain_on_one_rank: bool = False,
    keeps_deferred: bool = False,
) -> nn.Module:
    """Shard a model over the tensor-parallel axis of a mesh, in place.

    Parameters become DTensors on that axis and keep their names; they are sharded by the plan's rules, or replicated.
    Parameters of modules with `ignore` rules, of an nn.Embedding with max_norm, and of modules with sparse=True (whose
    gradients are sparse) stay plain. Forwards compute on local tensors with weft's operators. Afterwards, build the
    optimizer and apply FSDP2 (`fully_shard` over another axis) and torch.compile. `parallelize` does not communicate:
    all ranks must pass models with equal values.

    Args:
        model: a model of plain modules, on any device, meta included. Its buffers do not change, nor do parameters that
            are DTensors already.
        mesh: a DeviceMesh of one axis, or with an axis named "tensor_parallel".
        plan: see `Plan`. Applying the same plan again changes nothing.
        keeps_plain_on_one_rank: keep parameters plain if the tensor-parallel axis has one rank, because FSDP2 is faster
            on plain tensors than on DTensors. Has no effect if a rule sets a precision.
        keeps_deferred: leave the shards of deferred parameters deferred, because they are sharded further:
            `apply_fsdp` and `Pipeline.fully_shard` materialize what is left of them.

    Returns:
        `model`.

    Raises:
        ValueError: the plan does not fit the model, or the model was parallelized with another plan or mesh. The model
            is then unchanged.
    """
    tp_mesh = tensor_parallel_mesh(mesh)
    plan = plan if isinstance(plan, Plan) else Plan(plan)
    key = plan.key()
    if _is_applied(model, tp_mesh, key):
        plan._applied_to(model)
        return model
    materialize_buffers(model)
    assignments = plan.assign(model, tp_mesh.size())
    drop_rehearsal(model)
    roles: dict[int, SequenceRole] = {}
    if (plan.sequence_parallel or assignments.has_sequence_rules) and tp_mesh.size() > 1:
        roles = assign_sequence_roles(model, assignments, group_name_of(tp_mesh))
    ignored = _ignored_modules(model, assignments)
    dims = parameter_dims(model, assignments)
    _check_modules(model)
    check_written(model)
    if _shard_lists(model, tp_mesh, assignments, keeps_deferred):
        dims = parameter_dims(model, assignments)
    excluded = {id(m) for m in model.modules() if any(isinstance(p, DTensor) for p in m.parameters(recurse=False))}
    excluded |= ignored
    stays_plain = keeps_plain_on_one_rank and tp_mesh.size() == 1
    stays_plain = stays_plain and not any(options.precision for options in assignments.options.values())
    materialized = _replace_parameters(model, None if stays_plain else tp_mesh, dims, keeps_deferred)
    if not keeps_deferred:
        materialize(model)
    _set_parallel_classes(model, tp_mesh, assignments, roles, excluded)
    keep_recorded_outputs(model)
    notes = [*assignments.notes, *_apply_options(model, assignments)]
    for (module_name, attribute), count in assignments.heads.items():
        setattr(model.get_submodule(module_name), attribute, count)
    notes += [f"{join(name, attribute)} = {n} on this rank" for (name, attribute), n in assignments.heads.items()]
    notes += [
        f"{join(name, attribute)} = {n} on this rank, inside its module's forward"
        for name, counts in assignments.counts.items()
        for attribute, n in counts.items()
    ]
    notes += assignments.warnings()
    if roles:
        notes.append("activations between the blocks' layers are sharded along the sequence")
    if tp_mesh.get_rank() == 0:
        for sentence in assignments.warnings():
            warnings.warn(f"weft: {sentence}", stacklevel=_stacklevel_of_caller())
    if materialized:
        notes.append(
            f"full on every rank until they were sharded, as their values cannot be drawn in chunks: {materialized}"
        )
    state = state_of(model)
    assert state is not None
    set_state(model, dataclasses.replace(state, plan_key=key, plan_notes=tuple(notes)))
    plan._applied_to(model)
    return model


def _is_applied(model: nn.Module, mesh: DeviceMesh, key: Any) -> bool:
    state = state_of(model)
    if state is None or state.plan_key is None:
        return False
    if state.mesh != mesh:
        raise ValueError(
            f"parallelize: this {state.original_class.__name__} was already parallelized on the mesh {state.mesh}, "
            f"not on {mesh}; build the model anew for another mesh."
        )
    if state.plan_key != key:
        raise ValueError(
            f"parallelize: this {state.original_class.__name__} was parallelized with another plan already; "
            "build the model anew for another plan."
        )
    return True


_UNCHANGED = -1  # in place of a dim: the parameter of an ignored module, which stays unchanged


def _stacklevel_of_caller() -> int:
    """Return the `stacklevel` with which a warning of the calling function points outside of weft, Lightning, torch."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and _is_library(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    return level


def _is_library(module: str) -> bool:
    return module.partition(".")[0] in ("weft", "lightning", "lightning_fabric", "pytorch_lightning", "torch")


def _ignored_modules(model: nn.Module, assignments: Assignments) -> set[int]:
    """Return the ids of the modules that stay unchanged.

    These are the modules of `ignore` rules and those with adapted parameters (`has_adapted_parameter`), all modules
    below them, each nn.Embedding with max_norm, which writes to its weight in the forward (torch forbids that for a
    view of a DTensor), and each module with sparse=True, because torch has no DTensors with sparse gradients.
    """
    names = [name for name, a in assignments.styles.items() if a.style == "ignore"]
    embeddings = (m for m in model.modules() if isinstance(m, nn.Embedding) and m.max_norm is not None)
    sparse = (m for m in model.modules() if getattr(m, "sparse", False) is True)
    outermost = [model.get_submodule(name) for name in names]
    outermost += [module for module in model.modules() if has_adapted_parameter(module)]
    return {id(inner) for module in outermost for inner in module.modules()} | {*map(id, embeddings), *map(id, sparse)}


def parameter_dims(model: nn.Module, assignments: Assignments) -> dict[int, int | None]:
    """Return the dim along which each plain parameter is sharded (None: replicated), by the parameter's id.

    Parameters that stay unchanged, such as those of ignored modules, are left out.

    Raises:
        ValueError: the assignments shard a tied parameter differently in two modules.
    """
    ignored = _ignored_modules(model, assignments)
    by_module = {id(model.get_submodule(name)): a for name, a in assignments.styles.items()}
    dims: dict[int, int | None] = {}
    names: dict[int, str] = {}
    for module_name, module in model.named_modules():
        module_dims = shard_dims(module, by_module.get(id(module), Assignment("")).style)
        for name, parameter in module._parameters.items():
            if parameter is None or isinstance(parameter, DTensor):
                continue
            full_name, dim = join(module_name, name), module_dims.get(name)
            if full_name in assignments.unread_aliases:
                continue
            first_name = names.setdefault(id(parameter), full_name)
            if id(module) in ignored:
                dim = _UNCHANGED
            if dims.setdefault(id(parameter), dim) != dim:
                raise ValueError(
                    f"parallelize: '{first_name}' and '{full_name}' are one tied parameter, but the plan shards them "
                    "differently; give their modules rules that agree, or none."
                )
    return {parameter: dim for parameter, dim in dims.items() if dim != _UNCHANGED}


def _check_modules(model: nn.Module) -> None:
    """Raise ValueError for modules that cannot be sharded, or would keep using parameters that will be replaced."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for module_name, module in model.named_modules():
        parameters = [p for p in module._parameters.values() if p is not None]
        if isinstance(module, WrappedForward):
            is_checkpointed = isinstance(module, CheckpointedModule)
            done, function = (
                ("checkpointed", "checkpoint_activations") if is_checkpointed else ("compiled", "compile_blocks")
            )
            raise ValueError(
                f"parallelize: '{module_name}' is {done} already, and its new forward would not be; call "
                f"{function} after parallelize."
            )
        shown = f"'{module_name}'" if module_name else "the model itself"
        if parameters and isinstance(module, torch.jit.ScriptModule):
            raise ValueError(f"parallelize: {shown} is a ScriptModule; parallelize the module before scripting it.")
        for parameter in parameters:
            if isinstance(parameter, nn.parameter.UninitializedParameter):
                raise ValueError(f"parallelize: {shown} is lazy; run a forward once to give its parameters shapes.")
            if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
                raise ValueError(
                    f"parallelize: '{names[id(parameter)]}' has gradient hooks, which would be lost; "
                    "register them after parallelize."
                )
        if isinstance(module, nn.RNNBase):
            continue
        for attribute, value in module.__dict__.items():
            held = next((p for p in _held_parameters(attribute, value) if id(p) in names), None)
            if held is not None:
                raise ValueError(
                    f"parallelize: {shown} also keeps '{names[id(held)]}' in its plain attribute '{attribute}', which "
                    "would keep the old values; make that attribute a property, or remove it."
                )


def _held_parameters(attribute: str, value: object) -> Iterable[nn.Parameter]:
    if attribute in ("_parameters", "_modules", "_buffers"):
        return ()
    items: Iterable[object] = (value,)
    if isinstance(value, (list, tuple, set)):
        items = value
    elif isinstance(value, dict):
        items = value.values()
    return (item for item in items if isinstance(item, nn.Parameter))


def _replace_parameters(
    model: nn.Module, mesh: DeviceMesh | None, dims: dict[int, int | None], keeps_deferred: bool
) -> str:
    """Replace parameters one at a time, so that each full parameter is freed before the next is sharded.

    Without a mesh the new parameters are plain ones.

    Returns:
        The names, as one text, of the sharded deferred parameters that had to be materialized in full; if there are
        more than six, only the first four and the last.
    """
    owners: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for module_name, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in dims:
                owners.setdefault(id(parameter), []).append((module_name, module, name))
    materialized: list[str] = []
    for parameter_id, holders in owners.items():
        module_name, module, name = holders[0]
        # A variable for the full parameter would keep it alive until the next one is sharded.
        if mesh is None:
            if keeps_deferred:
                continue
            new, was_full = to_plain(cast("nn.Parameter", module._parameters[name])), False
        else:
            parameter = cast("nn.Parameter", module._parameters[name])
            new, was_full = to_dtensor(parameter, mesh, dims[parameter_id], keeps_deferred)
            del parameter
        materialized += [join(module_name, name)] if was_full else []
        for _, module, name in holders:
            module._parameters[name] = new
    return ", ".join(materialized if len(materialized) <= 6 else [*materialized[:4], "...", materialized[-1]])


def _set_parallel_classes(
    model: nn.Module, mesh: DeviceMesh, assignments: Assignments, roles: dict[int, SequenceRole], excluded: set[int]
) -> None:
    """Give modules the classes of their styles.

    `excluded`: the ids of the modules that keep their class, unless they are the model itself: ignored modules, and
    modules that had DTensor parameters before `parallelize`, whose code supports DTensors.
    """
    by_module = {id(model.get_submodule(name)): a for name, a in assignments.styles.items()}
    local_attributes = {id(model.get_submodule(name)): tuple(c.items()) for name, c in assignments.counts.items()}
    dropout_inputs = {id(model.get_submodule(name)): dims for name, dims in assignments.dropouts.items()}
    precisions = {id(module): assignments.precision_of(name) for name, module in model.named_modules()}
    has_own_precision = {
        id(model.get_submodule(name)) for name, options in assignments.options.items() if options.precision
    }
    names = {id(module): name for name, module in model.named_modules()}
    containers = {a.container for a in assignments.styles.values() if a.container is not None and not roles}
    scopes = {id(model.get_submodule(name)): Scope() for name in containers}
    changed = {*roles, *local_attributes, *dropout_inputs, *has_own_precision, *scopes}
    group_name = group_name_of(mesh)
    for module in (each for each in model.modules() if id(each) in roles):
        route_own_tokens(module)  # of experts that are sharded over the axis expert_parallel already
    for module in reversed(list(model.modules())):  # children first: a fused MLP records its children's classes
        assignment = by_module.get(id(module), Assignment(""))
        if state_of(module) is not None or (
            module is not model
            and (id(module) in excluded or not (_needs_parallel_class(module) or id(module) in changed))
        ):
            continue
        cls = type(module)
        mlp = assignment.mlp
        container = None if assignment.container is None else model.get_submodule(assignment.container)
        state = ModuleState(
            original_class=cls,
            style=assignment.style,
            mesh=mesh,
            group_name=group_name,
            name=names[id(module)],
            is_root=module is model,
            rule=assignment.rule,
            note=assignment.note,
            mlp=mlp,
            activation=assignment.activation,
            recompute=assignment.recompute,
            watched=assignment.watched,
            child_classes=() if mlp is None else tuple(type(module._modules[name]) for name in mlp.children),
            vocab_start=_vocab_start(module, mesh, assignment.style),
            transposed=assignment.style in (*COLUMN_STYLES, *ROW_STYLES, "vocab_head") and is_conv1d(module),
            is_layer_of_fused=assignment.fused_into is not None,
            sequence_role=roles.get(id(module)),
            precision=getattr(torch, precisions[id(module)]) if precisions[id(module)] else None,
            local_attributes=local_attributes.get(id(module), ()),
            dropout_inputs=dropout_inputs.get(id(module), ()),
            experts=_experts_state(module, mesh, assignment.style, is_own=id(module) in roles),
            scope=scopes.get(id(container)),
            own_scope=scopes.get(id(module)),
        )
        set_parallel_class(module, state)


def _apply_options(model: nn.Module, assignments: Assignments) -> list[str]:
    """Checkpoint and offload the modules whose rules have these options; returns notes for the report."""
    for name, options in assignments.options.items():
        module = model.get_submodule(name)
        if options.recompute:
            checkpoint_activations(module, "", offload=options.offload)
        elif options.offload:
            offload_activations(module)
    counts = collections.Counter(assignments.options.values())
    return [f"{options.rule or 'the model itself'}: {options}, for {n} modules" for options, n in counts.items()]


def _shard_lists(model: nn.Module, mesh: DeviceMesh, assignments: Assignments, keeps_deferred: bool) -> bool:
    """Shard the lists of experts that have the style experts; return whether there are any."""
    names = [name for name, assignment in assignments.styles.items() if assignment.style == "experts"]
    lists = [name for name in names if isinstance(model.get_submodule(name), nn.ModuleList)] if mesh.size() > 1 else []
    for name in lists:
        shard_list(model, name, mesh, mesh, keeps_deferred)
        del assignments.styles[name]  # a list that calls its experts itself has the forward of its class
    return bool(lists)


def _experts_state(module: nn.Module, mesh: DeviceMesh, style: str, is_own: bool) -> ExpertsState | None:
    """Return the state of a module with the style experts. `is_own`: each rank has a shard of the tokens."""
    layout = layout_of(module) if style == "experts" else None
    if layout is None:
        return None
    group_name, num_experts = group_name_of(mesh), num_experts_of(module, layout)
    tensor_group = "" if is_own else group_name
    return ExpertsState(type(module), layout, mesh, group_name, tensor_group, num_data=1, num_experts=num_experts)


def _vocab_start(module: nn.Module, mesh: DeviceMesh, style: str) -> int:
    if style not in ("vocab_embedding", "vocab_head"):
        return 0
    num_rows: Any = module.num_embeddings if style == "vocab_embedding" else features(module)[1]
    return shard_range(num_rows, mesh.size(), mesh.get_local_rank())[0]


def _needs_parallel_class(module: nn.Module) -> bool:
    """Return whether a module holds parameters itself, or has a forward and modules below it that hold some."""
    if isinstance(module, torch.jit.ScriptModule):
        return False
    holds = any(True for _ in module.parameters(recurse=False))
    return holds or (type(module).forward is not nn.Module.forward and any(True for _ in module.parameters()))
