"""Joins the weights of the gated MLPs of a parallelized model: see `weft.nn.join_gate_up`."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from weft.nn.gate_up import join_gate_up as join_weights
from weft.nn.mlp import ColumnRowMLP
from weft.strategy.sharding.local_tensor import local_of
from weft.strategy.sharding.state import state_of


def join_gate_up(model: nn.Module) -> int:
    """Join the gate and up weights of each gated MLP that is one operator; return the number of these MLPs.

    These are the modules with the style `column_row_mlp` and modules of `weft.nn.ColumnRowMLP`, without biases of gate
    and up. Call it after `parallelize` and after the model is on its device. The weights keep their values, names and
    gradients.

    Raises:
        ValueError: `fully_shard`, which gathers each weight into separate memory, has been applied to a module.
    """
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ValueError(
            "join_gate_up got a model with modules of fully_shard, which gathers each weight into memory of its own; "
            "leave join_gate_up out."
        )
    joined = [weights for module in model.modules() if (weights := gate_up_of(module)) is not None]
    with torch.no_grad():
        for gate, up in joined:
            join_weights(local_of(gate), local_of(up))
    return len(joined)


def gate_up_of(module: nn.Module) -> tuple[nn.Parameter, nn.Parameter] | None:
    """Return the weights that `join_gate_up` joins in a module; None if there are none."""
    if isinstance(module, ColumnRowMLP):
        return None if module.w3 is None or module.b1 is not None else (module.w1, module.w3)
    state = state_of(module)
    if state is None or state.style != "column_row_mlp" or state.mlp is None or state.mlp.gate is None:
        return None
    gate, up = (module.get_submodule(name) for name in state.mlp.children[:2])
    layers = (gate, up)
    if any(layer._parameters.get("bias") is not None for layer in layers):
        return None
    if any((child := state_of(layer)) is not None and child.transposed for layer in layers):
        return None
    weights = [layer._parameters["weight"] for layer in layers]
    assert weights[0] is not None and weights[1] is not None
    return None if weights[0] is weights[1] else (weights[0], weights[1])
