"""Typed calls of the optimizer steps and of the conversions between the formats of their tensors.

These operators work on one tensor without a process group and have no gradient.

A tensor is viewed as a matrix of `size(0)` rows whose columns are the other dims; a tensor with fewer than two dims is
one row. Low-precision formats:

- Codes: 8-bit numbers with one float32 scale, the largest magnitude, per block of 256 elements of a row (the last block
  of a row may be shorter). int8 codes c are scale * sign(c) * (c / 127)^2, uint8 codes scale * (c / 255)^2. Scales have
  the shape `[rows, blocks of a row]`, or `[blocks]` for fewer than two dims. A block with a number that is not finite
  has the scale NaN.
- Split floats: a bfloat16 number, the float32 number rounded to nearest, and the difference of their bits: int16
  restores all 32 bits, int8 the upper 24, to which the number is rounded first.

Steps round bfloat16 and coded states stochastically, by a hash of the seed, the step and the element's position in the
unsharded tensor. So every sharding along rows, or along columns at multiples of 256, gives the bits of the unsharded
step, and any range of rows may be stepped alone. Each step is computed in float32, and its update uses the states
before they are rounded. Invalid arguments raise ValueError or TypeError before anything is changed.
"""

from __future__ import annotations

import torch
from torch import Tensor


def adam_step_(
    parameter: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_scale: Tensor | None,
    exp_avg_sq: Tensor,
    exp_avg_sq_scale: Tensor | None,
    low_bits: Tensor | None,
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled_weight_decay: bool,
    maximize: bool,
    seed: int,
    row: int,
    column: int,
    full_columns: int,
) -> None:
    """Make one step of torch.optim.Adam, or of AdamW with `decoupled_weight_decay`, in place.

    All tensors are contiguous and on one device; all but the scales have the parameter's shape. Dtypes: parameter
    float32 or bfloat16; low_bits None or, with a bfloat16 parameter, int16 or int8 (a split float); grad float32 or the
    parameter's dtype; the moments both float32, both bfloat16, or int8 (exp_avg) and uint8 (exp_avg_sq) with float32
    scales. A bfloat16 parameter without low_bits is rounded to nearest even.

    `step` is the number of this step, from 1. `row` and `column` are the place of the tensor's first element in the
    unsharded matrix of `full_columns` columns.
    """
    torch.ops.weft.adam_step_(
        parameter,
        grad,
        exp_avg,
        exp_avg_scale,
        exp_avg_sq,
        exp_avg_sq_scale,
        low_bits,
        step=step,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        decoupled_weight_decay=decoupled_weight_decay,
        maximize=maximize,
        seed=seed,
        row=row,
        column=column,
        full_columns=full_columns,
    )


def momentum_step_(
    parameter: Tensor,
    grad: Tensor,
    momentum_buffer: Tensor,
    momentum_scale: Tensor | None,
    low_bits: Tensor | None,
    *,
    step: int,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    maximize: bool,
    seed: int,
    row: int,
    column: int,
    full_columns: int,
) -> None:
    """Make one step of torch.optim.SGD with momentum, in place; in step 1 the buffer becomes the gradient.

    momentum_buffer is float32, bfloat16, or int8 with a float32 scale; `momentum` is above 0. The other arguments are
    those of `adam_step_`.
    """
    torch.ops.weft.momentum_step_(
        parameter,
        grad,
        momentum_buffer,
        momentum_scale,
        low_bits,
        step=step,
        lr=lr,
        momentum=momentum,
        dampening=dampening,
        weight_decay=weight_decay,
        nesterov=nesterov,
        maximize=maximize,
        seed=seed,
        row=row,
        column=column,
        full_columns=full_columns,
    )


def split_float(x: Tensor, low_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the bfloat16 numbers and the lower bits, in `low_dtype` (int16 or int8), of a float32 x."""
    result: tuple[Tensor, Tensor] = torch.ops.weft.split_float(x, low_dtype)
    return result


def join_float(high: Tensor, low: Tensor) -> Tensor:
    """Return the float32 numbers of which `split_float` made the bfloat16 `high` and the int16 or int8 `low`."""
    result: Tensor = torch.ops.weft.join_float(high, low)
    return result


def quantize_blocks(x: Tensor, signed_codes: bool) -> tuple[Tensor, Tensor]:
    """Return the codes of a float32 x, rounded to nearest, and their scales: int8 codes if `signed_codes`, else uint8.

    With uint8, a positive number gets at least code 1, and a negative number code 0.
    """
    result: tuple[Tensor, Tensor] = torch.ops.weft.quantize_blocks(x, signed_codes)
    return result


def dequantize_blocks(codes: Tensor, scale: Tensor) -> Tensor:
    """Return the float32 numbers of int8 or uint8 codes with these scales."""
    result: Tensor = torch.ops.weft.dequantize_blocks(codes, scale)
    return result
