"""Switches torch's optimizers to their fused variants: the same steps in one pass, without large temporaries."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.utils._pytree import tree_map

from weft.strategy.optimizers.state_format import StateFormat
from weft.strategy.optimizers.use_low_precision import use_low_precision

# Exactly these classes (a subclass may do anything in its step), with the devices that have a fused kernel.
_DEVICES = {
    Adam: ("cpu", "cuda"),
    AdamW: ("cpu", "cuda"),
    SGD: ("cpu", "cuda"),
    Adagrad: ("cpu",),
}


def _on_local_tensors(mode: Any, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """Run a fused optimizer, which is elementwise, on local shards and plain tensors, also those of several meshes.

    The placements of a parameter, its gradient and its states may be any, but must be equal.
    Partial gradients, as some of torch's parallel styles leave them, are first summed over the ranks; collective.

    Raises:
        RuntimeError: a parameter, its gradient and its states have different placements.
    """
    lists = [arg for arg in args if isinstance(arg, (list, tuple)) and any(isinstance(t, DTensor) for t in arg)]
    summed: dict[int, DTensor] = {}
    for together in zip(*lists, strict=True):
        wanted, of_gradient, *of_states = (getattr(t, "placements", None) for t in together)
        if wanted is not None and any(p.is_partial() for p in of_gradient or ()):
            summed[id(together[1])] = together[1].redistribute(placements=wanted)
            of_gradient = wanted
        if any(placements != wanted for placements in (of_gradient, *of_states)):
            raise RuntimeError(
                f"{func} got parameters, gradients and states with the placements "
                f"{[getattr(t, 'placements', None) for t in together]}; give them the same ones, or pass fused=False."
            )

    def local_of(value: Any) -> Any:
        return summed.get(id(value), value)._local_tensor if isinstance(value, DTensor) else value

    local = tree_map(local_of, (args, kwargs or {}))
    return func(*local[0], **local[1])


# DTensor itself supports only the kernels of Adam and AdamW, and takes longer to propagate placements.
for _name in ("aten::_fused_sgd_", "aten::_fused_adagrad_", "aten::_fused_adam_", "aten::_fused_adamw_"):
    torch.library.register_torch_dispatch(_name, DTensor, _on_local_tensors)


def fuse(
    optimizer: Optimizer,
    model: nn.Module | None = None,
    *,
    optimizer_state: str = "float32",
    master_weights: str = "float32",
) -> str | None:
    """Make an optimizer of torch use fused kernels from its next step on.

    The optimizer stays fused after loading a state or adding parameter groups. Results differ only by rounding.

    Args:
        optimizer: changed in place, if possible.
        model: the model of its parameters, examined for sparse gradients; it also names the parameters.
        optimizer_state: "float32": the states that torch has, and torch's kernels. "bfloat16" or "int8": Adam, AdamW
            and SGD with momentum have states with 2 bytes or 1 byte for each element, and a kernel of weft; see
            `weft.strategy.optimizers.low_precision`.
        master_weights: "float32": weights keep their dtype. "split": float32 weights become bfloat16, and their other
            16 bits are a state of the optimizer; steps are those of float32 weights to the bit. "split8": 8 of these
            bits are kept, so that weights have 24 bits.

    Returns:
        None if the optimizer is fused, else the reason why it is not, in a few words.

    Raises:
        ValueError: an optimizer that has no such states.
    """
    state_format = StateFormat(optimizer_state, master_weights)
    if not state_format.is_usual:
        use_low_precision(optimizer, model, state_format)
        return None
    if all(group.get("fused") for group in optimizer.param_groups):
        return None
    if (why_not := _why_not_fused(optimizer, model)) is not None:
        return why_not
    _set_flags(optimizer)
    optimizer.register_load_state_dict_post_hook(_set_flags)
    return None


def _why_not_fused(optimizer: Optimizer, model: nn.Module | None) -> str | None:
    devices = _DEVICES.get(type(optimizer))
    if devices is None:
        return f"{type(optimizer).__name__} has no fused variant"
    for group in optimizer.param_groups:
        for flag in ("foreach", "fused"):
            if group.get(flag) is not None:
                return f"{flag}={group[flag]} was chosen"
        if group.get("differentiable"):
            return "it is differentiable"
        if (why_not := _why_parameters_not_fused(group["params"], devices)) is not None:
            return why_not
    # Not by the truth of the model, which torch.compile's modules derive from a length that the model may not have.
    modules = () if model is None else model.named_modules()
    name = next((name for name, module in modules if getattr(module, "sparse", False) is True), None)
    return None if name is None else f"the gradient of '{name}' is sparse"


def _why_parameters_not_fused(parameters: Iterable[torch.Tensor], devices: tuple[str, ...]) -> str | None:
    for parameter in parameters:
        if not parameter.is_floating_point():
            return f"it steps {parameter.dtype} parameters"
        if parameter.device.type not in devices:
            return f"there is no fused kernel on {parameter.device.type}"
    return None


def _set_flags(optimizer: Optimizer) -> None:
    """Set the flags and move step counts: a loaded state has the flags and devices with which it was saved."""
    for options in (optimizer.defaults, *optimizer.param_groups):
        options.update(fused=True, foreach=False)
    for parameter, state in optimizer.state.items():
        step = state.get("step")
        if isinstance(step, torch.Tensor):
            state["step"] = step.to(device=parameter.device, dtype=torch.float32)
