"""Shards the experts of a list over the ranks of a mesh: each rank keeps the parameters of its own ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from weft.strategy._plan import shard_range
from weft.strategy.deferred import attributes_of, full_value_of, is_deferred
from weft.strategy.experts.layer import ExpertsState
from weft.strategy.experts.list_forward import add_list
from weft.strategy.experts.list_modules import Calls, ExpertCall, StackedExperts, sharded_list_class
from weft.strategy.experts.lists import STACKED, caller_name, parameters_of, slots_of
from weft.strategy.sharding.shards import group_name_of


def shard_list(
    model: nn.Module, name: str, mesh: DeviceMesh, tensor_mesh: DeviceMesh | None, keeps_deferred: bool
) -> None:
    """Shard the experts of a list of a model, in place; no communication. `why_list_not_sharded` gives no reason.

    Args:
        mesh: of one axis. tensor_mesh, keeps_deferred: as in `parallelize_experts`.
    """
    module = model.get_submodule(name)
    assert isinstance(module, nn.ModuleList)
    caller = model.get_submodule(caller_name(name, module))
    experts = list(module)
    state = ExpertsState(
        original_class=type(experts[0]),
        layout=None,
        mesh=mesh,
        expert_group=group_name_of(mesh),
        tensor_group="" if tensor_mesh is None else group_name_of(tensor_mesh),
        num_data=mesh.size() // (1 if tensor_mesh is None else tensor_mesh.size()),
        num_experts=len(experts),
    )
    start, length = shard_range(len(experts), mesh.size(), mesh.get_local_rank())
    stacked = StackedExperts(state, experts, range(start, start + length))
    stacked.train(module.training)
    slots = [list(slots_of(expert)) for expert in experts]
    for position, parameter_name in enumerate(parameters_of(experts[0])):
        holders = [of_expert[position] for of_expert in slots]
        stacked.set_parameter(parameter_name, _stack(holders, range(start, start + length), mesh, keeps_deferred))
    calls = Calls()
    module.__class__ = sharded_list_class(type(module))
    module._modules.clear()
    module._modules[STACKED] = stacked
    module.__dict__["_weft_calls"] = calls
    module.__dict__["_weft_items"] = [ExpertCall(expert, idx, calls) for idx, expert in enumerate(experts)]
    add_list(caller, "" if caller is module else name.rpartition(".")[2])


@torch.no_grad()
def _stack(holders: list[tuple[nn.Module, str]], own: range, mesh: DeviceMesh, keeps_deferred: bool) -> nn.Parameter:
    """Return one parameter of all experts, of which this rank has the `own` ones; the experts' own become None."""
    parameters = [module._parameters[name] for module, name in holders]
    first = parameters[0]
    assert first is not None
    shape = torch.Size((len(holders), *first.shape))
    attributes, requires_grad = attributes_of(first), first.requires_grad
    values = [parameters[idx] for idx in own]
    grads = [None if each is None else each.grad for each in parameters]
    grad = None if grads[0] is None else _sharded([grads[idx] for idx in own], shape, mesh, keeps_deferred)
    del first, parameters, grads
    for module, name in holders:  # freed here, unless `values` has them
        module._parameters[name] = None
    result = _sharded(values, shape, mesh, keeps_deferred)
    result.requires_grad_(requires_grad)
    result._is_param = True
    assert isinstance(result, nn.Parameter)
    result.grad = grad
    result.__dict__.update(attributes)
    return result


def _sharded(own: Sequence[Tensor | None], shape: torch.Size, mesh: DeviceMesh, keeps_deferred: bool) -> DTensor:
    """Return a DTensor of tensors of this rank's experts, which are materialized one after another."""
    first = own[0]
    assert first is not None
    if any(is_deferred(each) for each in own) and not keeps_deferred:
        local = torch.empty((len(own), *shape[1:]), dtype=first.dtype, device=first.device)
        for idx, each in enumerate(own):
            assert each is not None
            local[idx].copy_(full_value_of(each) if is_deferred(each) else each)
    else:
        local = torch.stack([each.detach() for each in own if each is not None])
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
