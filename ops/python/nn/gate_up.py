"""Moves the weights of gate and up projections into one storage, so that `column_row_mlp` uses them as one weight."""

from __future__ import annotations

import torch
from torch import Tensor


def join_gate_up(gate: Tensor, up: Tensor) -> None:
    """Make both weights halves of one storage, in place; their values do not change.

    In eager mode, `column_row_mlp` without biases then computes both projections as one matrix product, and the
    gradient of its input, too. Both weights remain tensors of their own, for gradients, optimizers and checkpoints.
    `Module.to` with another device or dtype, `copy.deepcopy` and whatever else gives a weight new memory separate them;
    then there are two products. `torch.save` of one weight alone writes the storage of both.

    Args:
        gate, up: contiguous weights `[hidden, in]`, of one dtype, on one device; in this order w1 and w3 of
            `column_row_mlp`.

    Raises:
        ValueError: the weights differ in shape, dtype or device, are one tensor, are not contiguous matrices, or have
            no memory yet.
    """
    if gate is up or gate.is_meta or up.is_meta:
        got = "weights on the meta device" if gate.is_meta or up.is_meta else "one tensor as both weights"
        raise ValueError(f"join_gate_up got {got}; pass two weights that have values.")
    for weight in (gate, up):
        if weight.dim() != 2 or not weight.is_contiguous():
            raise ValueError(
                f"join_gate_up got a weight of shape {list(weight.shape)} and strides {list(weight.stride())}; "
                "pass contiguous matrices."
            )
    if (gate.shape, gate.dtype, gate.device) != (up.shape, up.dtype, up.device):
        described = [f"{list(weight.shape)} {weight.dtype} on {weight.device}" for weight in (gate, up)]
        raise ValueError(
            f"join_gate_up got weights {' and '.join(described)}; pass weights of one shape, dtype and device."
        )
    if are_joined(gate, up):
        return
    gate_up = torch.cat([gate.detach(), up.detach()])
    gate.data, up.data = gate_up.chunk(2)


def are_joined(gate: Tensor, up: Tensor) -> bool:
    """Return whether `up` begins in one storage where `gate` ends."""
    shares_storage = gate.untyped_storage().data_ptr() == up.untyped_storage().data_ptr()
    return shares_storage and int(up.storage_offset()) == int(gate.storage_offset()) + gate.numel()
