"""Shards the experts of a model over the axis expert_parallel of a mesh."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from weft.strategy.experts.layer import ExpertsState, set_state_of_experts, state_of_experts
from weft.strategy.experts.list_sharding import shard_list
from weft.strategy.experts.lists import STACKED, ExpertList, find_expert_lists, why_list_not_sharded
from weft.strategy.experts.recognition import ExpertsLayout, find_experts, num_experts_of, why_not_sharded
from weft.strategy.experts.shards import EXPERT_AXIS
from weft.strategy.recognition.adapters import has_adapted_parameter
from weft.strategy.sharding.shards import group_name_of, to_dtensor


def parallelize_experts(
    model: nn.Module, mesh: DeviceMesh, *, tensor_mesh: DeviceMesh | None = None, keeps_deferred: bool = False
) -> list[str]:
    """Shard the experts of a model's layers, in place; return the names of the modules that hold them.

    Each rank of the axis keeps some experts of each layer, as torch.chunk divides them. The modules' forwards are
    collective over the axis; the ranks may have different numbers of tokens, also none. Call this before `parallelize`,
    which leaves the experts as they are; gradients of experts are to be averaged over the ranks that hold the same
    experts alone. No communication: all ranks pass models with equal values.

    Args:
        model: has modules with experts as in Hugging Face's Transformers, see `find_experts`, or lists of them, see
            `find_expert_lists`.
        mesh: has the axis expert_parallel.
        tensor_mesh: an axis of ranks that have the same tokens and are neighbours along expert_parallel; each sends its
            part of them. None: all ranks along expert_parallel have different tokens.
        keeps_deferred: as in `parallelize`.

    Raises:
        ValueError: the mesh has no such axis, the model has no module with experts, a rank would hold none of them, or
            they are sharded over another mesh already. Nothing has been changed then.
    """
    mesh = _expert_axis(mesh)
    num_tensor = 1 if tensor_mesh is None else tensor_mesh.size()
    found, lists = find_experts(model), find_expert_lists(model)
    _check(model, found, lists, mesh)
    for name, layout in found.items():
        module = model.get_submodule(name)
        if state_of_experts(module) is not None:
            continue
        state = ExpertsState(
            original_class=type(module),
            layout=layout,
            mesh=mesh,
            expert_group=group_name_of(mesh),
            tensor_group="" if tensor_mesh is None else group_name_of(tensor_mesh),
            num_data=mesh.size() // num_tensor,
            num_experts=num_experts_of(module, layout),
        )
        for parameter_name in layout.names:
            parameter = module._parameters[parameter_name]
            assert parameter is not None
            module._parameters[parameter_name], _ = to_dtensor(parameter, mesh, 0, keeps_deferred)
        set_state_of_experts(module, state)
    for name in lists:
        if not isinstance(model.get_submodule(name), ExpertList):
            shard_list(model, name, mesh, tensor_mesh, keeps_deferred)
    return [*found, *lists]


def check_experts(model: nn.Module, mesh: DeviceMesh) -> None:
    """Raise the ValueErrors of `parallelize_experts`, without changes; before a model is divided into stages."""
    lists = find_expert_lists(model)
    if lists:
        raise ValueError(
            f"parallelize_experts got the list of experts '{lists[0]}' in a model that is divided into stages; experts "
            "in an nn.ModuleList need a layout without pp: leave it out, or leave expert parallelism out."
        )
    _check(model, find_experts(model), lists, _expert_axis(mesh))


def _expert_axis(mesh: DeviceMesh) -> DeviceMesh:
    names = mesh.mesh_dim_names or ()
    if EXPERT_AXIS not in names:
        raise ValueError(
            f"parallelize_experts got a mesh with the axes {names}; give one of them the name {EXPERT_AXIS!r}."
        )
    return mesh[EXPERT_AXIS]


def _check(model: nn.Module, found: dict[str, ExpertsLayout], lists: list[str], mesh: DeviceMesh) -> None:
    if not found and not lists:
        raise ValueError(
            f"parallelize_experts got a {type(model).__name__} without a module of experts in the form of Hugging "
            "Face's Transformers (parameters gate_up_proj and down_proj, [experts, ...], or an nn.ModuleList named "
            "experts); leave expert parallelism out."
        )
    for name in lists:
        module: nn.Module = model.get_submodule(name)
        if isinstance(module, ExpertList):
            _check_mesh(name, module.get_submodule(STACKED), mesh)
            continue
        reason = why_list_not_sharded(model, name, mesh.size())
        if reason is not None:
            raise ValueError(f"parallelize_experts cannot shard '{name}': {reason}.")
    for name, layout in found.items():
        module = model.get_submodule(name)
        _check_mesh(name, module, mesh)
        state = state_of_experts(module)
        if name and has_adapted_parameter(model.get_submodule(name.rpartition(".")[0])):
            raise ValueError(
                f"parallelize_experts: PEFT adapts parameters of the experts '{name}', which cannot be sharded with "
                'their adapters; name only other layers in target_modules and target_parameters ("all-linear" '
                "includes experts), or leave expert parallelism out."
            )
        if state is None and any(isinstance(module._parameters[each], DTensor) for each in layout.names):
            raise ValueError(
                f"parallelize_experts: the experts of '{name}' are DTensors already; call parallelize_experts before "
                "parallelize and fully_shard."
            )
        reason = why_not_sharded(module, layout, mesh.size())
        if reason is not None:
            raise ValueError(f"parallelize_experts cannot shard '{name}': {reason}.")


def _check_mesh(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    """Raise ValueError if the experts of a module are sharded over another mesh."""
    state = state_of_experts(module)
    if state is not None and state.mesh != mesh:
        raise ValueError(
            f"parallelize_experts: the experts of '{name}' are sharded over {state.mesh} already, not over {mesh}; "
            "build the model anew for another mesh."
        )
