"""FSDP2 for a model: chooses the modules that are gathered and freed as one unit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from weft.strategy.modules.activation_checkpointing import repeated_blocks
from weft.strategy.modules.offload import OffloadedModule
from weft.strategy.sharding.state import original_class, state_of

_MARK = "_weft_fully_sharded"


def shard_fully(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    reshard_after_forward: bool = True,
    mp_policy: MixedPrecisionPolicy | None = None,
    entry_points: Iterable[str] | None = None,
    root_is_called: bool = True,
) -> list[str]:
    """Shard a model's parameters over data-parallel ranks by FSDP2, in place, after `parallelize`.

    Each repeated block is a unit: its parameters are gathered when it runs and reduced together. With `entry_points`,
    callers do not call the model's own forward; then the modules that it calls are units, too, if there are several, or
    if `mp_policy` casts their inputs. Parameters in no unit belong to the model itself: they may be read, and their
    layers called, anywhere inside. Weights that units share belong to the module around those units. If `mp_policy` has
    a dtype, a module whose rule in the plan names another dtype is also a unit, and is gathered in that dtype. Applying
    the same again changes nothing.

    Args:
        model: plain modules, or modules that `parallelize` and `checkpoint_activations` have changed.
        mesh: the data-parallel axis, or (replicas, data-parallel) axes, of the mesh that the model is on.
        reshard_after_forward: free each unit after its forward (ZeRO stage 3), or after its backward (2).
        mp_policy: dtypes of gathered parameters and reduced gradients; None: as the parameters are.
        entry_points: methods of `model` that are called besides its forward; None: none.
        root_is_called: False: backwards run while a method of the model runs, so `model` must own no parameters.

    Returns:
        The names of the units, outermost first; "" is the model.

    Raises:
        ValueError: `fully_shard` was applied to the model before, or `root_is_called` is False and the model itself
            owns parameters. Nothing has been changed then.
    """
    key = (mesh, reshard_after_forward, mp_policy)
    marked = model.__dict__.get(_MARK)
    if marked is not None and marked[0] == key:
        return list(marked[1])
    _check_not_sharded(model)
    policy = mp_policy or MixedPrecisionPolicy()
    state = state_of(model)
    if policy.param_dtype is not None and state is not None and state.precision is not None:
        policy = dataclasses.replace(policy, param_dtype=state.precision)
    dtype_overrides = _dtype_overrides(model, policy.param_dtype)
    names = _units(model, dtype_overrides, inside=entry_points is not None)
    _check_units(model, names, dtype_overrides)
    blocks = repeated_blocks(model)
    callees = [name for name in names if name not in blocks and name not in dtype_overrides]
    if root_is_called and len(callees) == 1 and policy.param_dtype is None:
        names.remove(callees.pop())  # it is now gathered with the model, and its other methods work
    if not root_is_called:
        _check_no_root_parameters(model, names)
    # The backward needs the last block first: freeing it after the forward would only gather it again at once.
    last = tuple(f"{block}." for block in blocks[-1:])
    stays_gathered = _units_with_heads(model, names) | {name for name in names if f"{name}.".startswith(last)}
    for name in reversed(names):
        frees = reshard_after_forward and name not in stays_gathered and (name not in callees or len(callees) > 1)
        unit_policy = policy
        if name in dtype_overrides:
            unit_policy = MixedPrecisionPolicy(dtype_overrides[name], policy.reduce_dtype, cast_forward_inputs=False)
        fully_shard(model.get_submodule(name), mesh=mesh, reshard_after_forward=frees, mp_policy=unit_policy)
    root_policy = MixedPrecisionPolicy(policy.param_dtype, policy.reduce_dtype, cast_forward_inputs=False)
    is_module = entry_points is not None
    if root_is_called:
        fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=root_policy if is_module else policy)
        for method in entry_points or ():
            register_fsdp_forward_method(model, method)
        names = ["", *names]
    if mesh.device_type == "cpu":
        _disable_prefetch(model, names)
    model.__dict__[_MARK] = (key, tuple(names))
    return names


def _disable_prefetch(model: nn.Module, names: list[str]) -> None:
    """Disable prefetch: without streams there is no overlap, and a unit gathered ahead only takes memory."""
    for name in names:
        unit: Any = model.get_submodule(name)
        unit.set_modules_to_backward_prefetch([unit])  # this unit is gathered already


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
                f"shard_fully: fully_shard was applied to {shown} already; leave that out, or leave all sharding over "
                "the data-parallel axis to your own code."
            )


def _check_units(model: nn.Module, names: list[str], dtype_overrides: dict[str, torch.dtype]) -> None:
    tied = next((name for name in dtype_overrides if name not in names), None)
    if tied is not None:
        raise ValueError(
            f"shard_fully: the rule of '{tied}' says precision, but it shares a weight with modules beside it, which "
            "is gathered in another dtype; leave precision out of the rule."
        )
    for name, module in model.named_modules():
        below = next((unit for unit in names if unit.startswith(f"{name}." if name else "") and unit != name), None)
        if below is not None and isinstance(module, OffloadedModule):
            shown = f"'{name}'" if name else "the model itself"
            raise ValueError(
                f"shard_fully: the rule of {shown} says offload, and '{below}' "
                "inside is gathered apart, whose weights would be copied, too; give the rule to modules inside it."
            )


def _check_no_root_parameters(model: nn.Module, names: list[str]) -> None:
    owners = _owning_units(model, ["", *names])
    root_parameters = [name for name, units in owners.items() if "" in units]
    if root_parameters:
        raise ValueError(
            f"shard_fully: with manual optimization a {original_class(model).__name__} cannot gather parameters that "
            f"are in no module it calls, or in several, such as '{root_parameters[0]}'; put them into one submodule "
            "with a forward, or pass zero_stage=1."
        )


def _dtype_overrides(model: nn.Module, gathered: torch.dtype | None) -> dict[str, torch.dtype]:
    """Return the outermost modules with parameters that compute in another dtype than `gathered`, with that dtype."""
    result: dict[str, torch.dtype] = {}
    for name, module in model.named_modules() if gathered is not None else ():
        above = next((other for other in reversed(result) if name.startswith(f"{other}.")), None)
        current = gathered if above is None else result[above]
        state = state_of(module)
        dtype = None if state is None else state.precision
        if name and dtype not in (None, current) and any(True for _ in module.parameters()):
            result[name] = dtype
    return result


def _units(model: nn.Module, dtype_overrides: Iterable[str], inside: bool) -> list[str]:
    """Return the names of the units below the model, outer ones first."""
    names = {*repeated_blocks(model), *dtype_overrides, *(_callees(model) if inside else ())}
    while True:
        candidates = ["", *(name for name, _ in model.named_modules() if name in names)]
        shared = [units for units in _owning_units(model, candidates).values() if len(units) > 1]
        if not shared:
            return candidates[1:]
        names -= {unit for units in shared for unit in units}


def _units_with_heads(model: nn.Module, names: list[str]) -> set[str]:
    """Return the innermost units around layers whose weight a loss uses again after their forward."""
    states = ((name, state_of(module)) for name, module in model.named_modules())
    heads = [name for name, state in states if state is not None and state.style == "vocab_head"]
    holding = ([unit for unit in names if head == unit or head.startswith(f"{unit}.")] for head in heads)
    return {max(units, key=len) for units in holding if units}


def _callees(model: nn.Module, prefix: str = "") -> Iterator[str]:
    """Yield the outermost modules inside that have a forward and parameters."""
    for key, child in model.named_children():
        name = f"{prefix}{key}"
        if type(child).forward is nn.Module.forward:
            yield from _callees(child, f"{name}.")
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
    """Set whether backwards reduce gradients; if not, they keep unsharded ones until a later backward reduces them."""
    for module in fsdp_roots(model):
        module.set_requires_gradient_sync(is_on)


def free_gathered(model: nn.Module) -> None:
    """Free parameters that a forward has gathered and no backward has freed.

    After a step they would have stale values, and the `requires_grad` of the time they were gathered.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
