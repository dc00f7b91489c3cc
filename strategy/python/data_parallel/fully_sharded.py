"""FSDP2 for a model: chooses the modules that are gathered and freed as one unit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from weft.strategy.data_parallel.sparse_gradients import sparse_parameters
from weft.strategy.deferred import materialize
from weft.strategy.experts.layer import ShardedExperts
from weft.strategy.modules.activation_checkpointing import repeated_blocks
from weft.strategy.modules.offload import OffloadedModule
from weft.strategy.recognition.recorded_outputs import keep_recorded_outputs
from weft.strategy.sharding.state import original_class, state_of

_MARK = "_weft_fully_sharded"


def apply_fsdp(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    reshard_after_forward: bool = True,
    mp_policy: MixedPrecisionPolicy | None = None,
    entry_points: Iterable[str] | None = None,
    root_is_unit: bool = True,
    offload_policy: OffloadPolicy | None = None,
    expert_mesh: DeviceMesh | None = None,
) -> list[str]:
    """Shard a model's parameters over data-parallel ranks by FSDP2, in place, after `parallelize`.

    A unit is a module to which FSDP2 is applied: its parameters are all-gathered together before it runs, and their
    gradients reduce-scattered together. A parameter belongs to the innermost unit around it. Units are

    - the model itself, if `root_is_unit`. Its own parameters are those in no other unit. They stay gathered from the
      model's forward to its backward, so code anywhere in the model may read them and call their layers.
    - each repeated block.
    - each module with experts that are sharded over expert_parallel, over `expert_mesh`.
    - with `entry_points`, the outermost modules with a forward and parameters, which a caller may call without calling
      the model's own forward. A single such module is a unit only if `mp_policy` has a `param_dtype` or the model
      itself is no unit.
    - if `mp_policy` has a `param_dtype`, each module whose rule in the plan names another dtype than that of the
      modules around it; its parameters are gathered in the dtype of the rule.

    A module that shares a weight with modules outside of it is no unit: its parameters belong to the unit around it. A
    second call with equal `mesh`, `reshard_after_forward`, `mp_policy` and `offload_policy` changes nothing.

    Args:
        model: plain modules, or modules that `parallelize` and `checkpoint_activations` have changed.
        mesh: the data-parallel axis, or (replicas, data-parallel) axes, of the mesh that the model is on.
        reshard_after_forward: free units after their forward (ZeRO stage 3), or after their backward (stage 2). The
            model itself, a single unit of `entry_points`, the last block with the units inside it, and the innermost
            units around vocab_head layers are always freed after their backward.
        mp_policy: dtypes of gathered parameters and reduced gradients; None: those of the parameters. A precision in
            the rule of the model itself replaces a given `param_dtype`.
        entry_points: the names of the methods of `model` that are called besides its forward. None: only the forward of
            `model` is called, not that of a module inside; empty: modules inside may be called, but no other method.
        offload_policy: CPUOffloadPolicy: shards of parameters and gradients are in CPU memory, and the optimizer steps
            them there; a unit's shards come to the device when it is gathered. None: they stay on the device.
        expert_mesh: as `mesh`, of the ranks that hold the same experts; None: no experts are sharded.
        root_is_unit: whether the model itself is a unit. Pass False if the model's methods run backwards (manual
            optimization); then each parameter must belong to another unit.

    Returns:
        The names of the units, outermost first; "" is the model.

    Raises:
        ValueError: `fully_shard` was applied to the model before; a module has sparse gradients; `root_is_unit` is
            False and a parameter is in no other unit; or a rule's precision or offload does not fit the units. Nothing
            has been changed then.
    """
    key = (mesh, reshard_after_forward, mp_policy, offload_policy, expert_mesh)
    marked = model.__dict__.get(_MARK)
    if marked is not None and marked[0] == key:
        return list(marked[1])
    _check_not_sharded(model)
    _check_no_sparse_gradients(model)
    policy, offload = mp_policy or MixedPrecisionPolicy(), offload_policy or OffloadPolicy()
    state = state_of(model)
    if policy.param_dtype is not None and state is not None and state.precision is not None:
        policy = dataclasses.replace(policy, param_dtype=state.precision)
    dtype_overrides = _dtype_overrides(model, policy.param_dtype)
    has_entry_points = entry_points is not None
    names = _units(model, dtype_overrides, with_callees=has_entry_points)
    _check_units(model, names, dtype_overrides)
    blocks = repeated_blocks(model)
    callees = [name for name in names if name not in blocks and name not in dtype_overrides]
    if root_is_unit and len(callees) == 1 and policy.param_dtype is None:
        names.remove(callees.pop())  # gathered with the model, so that methods other than its forward work, too
    if not root_is_unit:
        _check_no_root_parameters(model, names)
    # The backward begins with the loss, which reads the weights of vocab heads again, and with the last block: these
    # would be gathered again right after their forward has freed them.
    last = tuple(f"{block}." for block in blocks[-1:])
    stays_gathered = _units_with_vocab_heads(model, names) | {name for name in names if f"{name}.".startswith(last)}
    experts = [] if expert_mesh is None else [n for n, m in model.named_modules() if isinstance(m, ShardedExperts)]
    for name in experts:
        fully_shard(
            model.get_submodule(name),
            mesh=expert_mesh,
            reshard_after_forward=reshard_after_forward and not name.startswith(last),
            mp_policy=policy,
            offload_policy=offload,
        )
    for name in reversed(names):
        frees = reshard_after_forward and name not in stays_gathered and (name not in callees or len(callees) > 1)
        unit_policy = policy
        if name in dtype_overrides:
            unit_policy = MixedPrecisionPolicy(dtype_overrides[name], policy.reduce_dtype, cast_forward_inputs=False)
        fully_shard(
            model.get_submodule(name),
            mesh=mesh,
            reshard_after_forward=frees,
            mp_policy=unit_policy,
            offload_policy=offload,
        )
    root_policy = MixedPrecisionPolicy(policy.param_dtype, policy.reduce_dtype, cast_forward_inputs=False)
    if root_is_unit:
        policy = root_policy if has_entry_points else policy
        fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=policy, offload_policy=offload)
        for method in entry_points or ():
            register_fsdp_forward_method(model, method)
        names = ["", *names]
    names += experts
    if mesh.device_type == "cpu":
        _disable_prefetch(model, names)
    materialize(model)
    keep_recorded_outputs(model)
    model.__dict__[_MARK] = (key, tuple(names))
    return names


def mixed_precision_policy(precision: str) -> MixedPrecisionPolicy | None:
    """Return FSDP2's policy for a precision of Lightning; None: FSDP2 gathers and reduces in the parameters' dtypes.

    Half-precision gradients are always reduced in float32, which increases only the bytes that are sent.
    """
    half = {"bf16-mixed": torch.bfloat16, "bf16-true": torch.bfloat16, "16-true": torch.float16}.get(precision)
    if half is None:
        return None
    gathered = half if precision.endswith("mixed") else None
    return MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=torch.float32)


def _disable_prefetch(model: nn.Module, names: list[str]) -> None:
    """Disable prefetch, on CPU: without streams there is no overlap, and a unit gathered ahead only takes memory."""
    for name in names:
        unit: Any = model.get_submodule(name)
        # An empty list would mean FSDP2's default prefetch. A unit that prefetches only itself gathers nothing: it is
        # gathered already when its backward begins.
        unit.set_modules_to_backward_prefetch([unit])


def fsdp_roots(model: nn.Module) -> list[FSDPModule]:
    """Return the outermost modules that FSDP2 has changed."""
    roots: list[tuple[str, FSDPModule]] = []
    for name, module in model.named_modules():
        is_inside = any(not root or name.startswith(f"{root}.") for root, _ in roots)
        if isinstance(module, FSDPModule) and not is_inside:
            roots.append((name, module))
    return [module for _, module in roots]


def _check_not_sharded(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            shown = f"'{name}'" if name else "the model itself"
            raise ValueError(
                f"apply_fsdp: fully_shard was applied to {shown} already, and weft applies it to the full model; "
                "remove that call, or pass plan=None without zero_stage and do all sharding in your own code."
            )


def _check_no_sparse_gradients(model: nn.Module) -> None:
    name = next(iter(sparse_parameters(model).values()), None)
    if name is not None:
        raise ValueError(
            f"apply_fsdp: the gradient of '{name}' is sparse (sparse=True), and FSDP2 reduces dense gradients; pass "
            "sparse=False to that module, or zero_stage=0."
        )


def _check_units(model: nn.Module, names: list[str], dtype_overrides: dict[str, torch.dtype]) -> None:
    tied = next((name for name in dtype_overrides if name not in names), None)
    if tied is not None:
        raise ValueError(
            f"apply_fsdp: the rule of '{tied}' says precision, but the module shares a weight with modules outside of "
            "it, and FSDP2 gathers a weight in one dtype; leave precision out of the rule."
        )
    for name, module in model.named_modules():
        below = next((unit for unit in names if unit.startswith(f"{name}." if name else "") and unit != name), None)
        if below is not None and isinstance(module, OffloadedModule):
            shown = f"'{name}'" if name else "the model itself"
            raise ValueError(
                f"apply_fsdp: the rule of {shown} says offload, but FSDP2 gathers '{below}' inside it separately, and "
                "the gathered weights would be offloaded, too; give the rule to modules without such modules inside."
            )


def _check_no_root_parameters(model: nn.Module, names: list[str]) -> None:
    owners = _owning_units(model, ["", *names])
    root_parameters = [name for name, units in owners.items() if "" in units]
    if root_parameters:
        raise ValueError(
            f"apply_fsdp: with manual optimization a {original_class(model).__name__} cannot gather parameters that "
            f"are in no module it calls, or in several, such as '{root_parameters[0]}'; put them into one submodule "
            "with a forward, or pass zero_stage=1."
        )


def _dtype_overrides(model: nn.Module, param_dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    """Return the modules with parameters that compute in another dtype than the modules around them, with that dtype.

    `param_dtype`: the dtype of the model; None: each parameter is gathered in the dtype it has; the result is empty.
    """
    result: dict[str, torch.dtype] = {}
    for name, module in model.named_modules() if param_dtype is not None else ():
        above = next((other for other in reversed(result) if name.startswith(f"{other}.")), None)
        current = param_dtype if above is None else result[above]
        state = state_of(module)
        dtype = None if state is None else state.precision
        if name and dtype not in (None, current) and any(True for _ in module.parameters()):
            result[name] = dtype
    return result


def _units(model: nn.Module, dtype_overrides: Iterable[str], with_callees: bool) -> list[str]:
    """Return the names of the units below the model, outer ones first.

    `with_callees`: include the modules that the model's methods may call.
    """
    names = {*repeated_blocks(model), *dtype_overrides, *(_outermost_with_forward(model) if with_callees else ())}
    while True:
        candidates = ["", *(name for name, _ in model.named_modules() if name in names)]
        shared = [units for units in _owning_units(model, candidates).values() if len(units) > 1]
        if not shared:
            return candidates[1:]
        names -= {unit for units in shared for unit in units}


def _units_with_vocab_heads(model: nn.Module, names: list[str]) -> set[str]:
    """Return the innermost units around layers whose weight a loss uses again after their forward."""
    states = ((name, state_of(module)) for name, module in model.named_modules())
    heads = [name for name, state in states if state is not None and state.style == "vocab_head"]
    holding = ([unit for unit in names if head == unit or head.startswith(f"{unit}.")] for head in heads)
    return {max(units, key=len) for units in holding if units}


def _outermost_with_forward(model: nn.Module, prefix: str = "") -> Iterator[str]:
    """Yield the names of the outermost modules below the model that have a forward and parameters."""
    for key, child in model.named_children():
        name = f"{prefix}{key}"
        if type(child).forward is nn.Module.forward:
            yield from _outermost_with_forward(child, f"{name}.")
        elif any(True for _ in child.parameters()):
            yield name


def _owning_units(model: nn.Module, candidates: list[str]) -> dict[str, set[str]]:
    """Return the innermost candidates that hold each parameter, by the parameter's first name."""
    first_names: dict[int, str] = {}
    owners: dict[str, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        holding = [unit for unit in candidates if not unit or name.startswith(f"{unit}.")]
        first = first_names.setdefault(id(parameter), name)
        owners.setdefault(first, set()).add(max(holding, key=len))
    return owners


def set_gradient_sync(model: nn.Module, is_on: bool) -> None:
    """Set whether backwards reduce-scatter gradients; while it is off, ranks accumulate unsharded gradients."""
    for module in fsdp_roots(model):
        module.set_requires_gradient_sync(is_on)


def free_gathered(model: nn.Module) -> None:
    """Free parameters that a forward has gathered and no backward has freed.

    After a step they would have stale values, and the `requires_grad` that the parameters had when they were gathered.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
