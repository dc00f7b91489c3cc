"""Shards the experts of a model over the axis expert_parallel of a mesh."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from weft.strategy._plan import shard_range
from weft.strategy.experts.layer import ExpertsState, set_state_of_experts, state_of_experts
from weft.strategy.experts.recognition import ExpertsLayout, find_experts, num_experts_of
from weft.strategy.experts.shards import EXPERT_AXIS, shard_parameter
from weft.strategy.sharding.shards import TENSOR_PARALLEL, group_name_of


def parallelize_experts(model: nn.Module, mesh: DeviceMesh, *, keeps_deferred: bool = False) -> list[str]:
    """Shard the experts of a model's layers, in place; return the names of the modules that hold them.

    Each rank of the axis keeps some experts of each layer, as torch.chunk divides them. The modules' forwards are
    collective over the axis; the ranks may have different numbers of tokens, also none. Call this before `parallelize`,
    which leaves the experts as they are; gradients of experts are to be averaged over the ranks that hold the same
    experts alone. No communication: all ranks pass models with equal values.

    Args:
        model: has modules with experts as in Hugging Face's Transformers; see `find_experts`.
        mesh: has the axis expert_parallel and, optionally, tensor_parallel, whose ranks have the same tokens.
        keeps_deferred: as in `parallelize`.

    Raises:
        ValueError: the mesh has no such axis, the model has no module with experts, a rank would hold none of them, or
            they are sharded over another mesh already. Nothing has been changed then.
    """
    names = mesh.mesh_dim_names or ()
    if EXPERT_AXIS not in names:
        raise ValueError(
            f"parallelize_experts got a mesh with the axes {names}; give one of them the name {EXPERT_AXIS!r}."
        )
    axes = tuple(name for name in (EXPERT_AXIS, TENSOR_PARALLEL) if name in names)
    mesh = mesh[axes] if len(axes) > 1 else mesh[EXPERT_AXIS]
    found = find_experts(model)
    axis = mesh[EXPERT_AXIS]
    _check(model, found, mesh, axis.size())
    for name, layout in found.items():
        module = model.get_submodule(name)
        if state_of_experts(module) is not None:
            continue
        placements = (Shard(0), *(Replicate() for _ in axes[1:]))
        state = ExpertsState(
            original_class=type(module),
            layout=layout,
            mesh=mesh,
            expert_group=group_name_of(axis),
            num_ranks=axis.size(),
            num_experts=num_experts_of(module, layout),
        )
        for parameter_name in layout.names:
            parameter = module._parameters[parameter_name]
            assert parameter is not None
            module._parameters[parameter_name] = shard_parameter(parameter, mesh, placements, keeps_deferred)
        set_state_of_experts(module, state)
    return list(found)


def _check(model: nn.Module, found: dict[str, ExpertsLayout], mesh: DeviceMesh, num_ranks: int) -> None:
    if not found:
        raise ValueError(
            f"parallelize_experts got a {type(model).__name__} without a module of experts in the form of Hugging "
            "Face's Transformers (parameters gate_up_proj and down_proj, [experts, ...]); leave expert parallelism out."
        )
    for name, layout in found.items():
        module = model.get_submodule(name)
        state = state_of_experts(module)
        if state is not None and state.mesh != mesh:
            raise ValueError(
                f"parallelize_experts: the experts of '{name}' are sharded over {state.mesh} already, not over {mesh}; "
                "build the model anew for another mesh."
            )
        if state is None and any(isinstance(module._parameters[each], DTensor) for each in layout.names):
            raise ValueError(
                f"parallelize_experts: the experts of '{name}' are DTensors already; call parallelize_experts before "
                "parallelize and fully_shard."
            )
        num_experts = num_experts_of(module, layout)
        if shard_range(num_experts, num_ranks, num_ranks - 1)[1] == 0:
            raise ValueError(
                f"parallelize_experts got {num_ranks} expert-parallel ranks, and '{name}' has {num_experts} experts, "
                "of which the last rank would hold none; use a number of ranks that divides the number of experts."
            )
