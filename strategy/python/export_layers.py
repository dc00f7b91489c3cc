"""Scriptable layers that replace parallelized layers in an exported copy where weft.nn has no layer for the purpose.

`export_local` makes them around existing parameters: `weight`, and `bias` or None.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn


class ColumnLayer(nn.Module):
    """This rank's output features of a linear layer: `[..., in]` -> `[..., out_local]`, or `[..., out]` gathered.

    Attributes: group_name; in_features and out_features of the unsharded layer; transposed: whether the weight is
    `[in, out_local]`, as in GPT-2's Conv1D; gathers_output: whether the output is `[..., out]`.
    """

    if TYPE_CHECKING:  # TorchScript would read annotations at run time
        weight: torch.Tensor
        bias: torch.Tensor | None
        group_name: str
        out_features: int
        transposed: bool
        gathers_output: bool

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight.t() if self.transposed else self.weight
        output = torch.ops.weft.column_linear(x, weight, self.bias, group_name=self.group_name)
        if self.gathers_output:
            output = torch.ops.weft.gather_from_group(
                output, output.dim() - 1, self.group_name, dim_size=self.out_features
            )
        return output


class RowLayer(nn.Module):
    """This rank's input features of a linear layer: `[..., in_local]`, or `[..., in]`, which is split -> `[..., out]`.

    Attributes: those of ColumnLayer except gathers_output (transposed: the weight is `[in_local, out]`);
    splits_input: whether the input is `[..., in]`.
    """

    if TYPE_CHECKING:
        weight: torch.Tensor
        bias: torch.Tensor | None
        group_name: str
        transposed: bool
        splits_input: bool

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight.t() if self.transposed else self.weight
        if self.splits_input:
            x = torch.ops.weft.scatter_to_group(x, x.dim() - 1, self.group_name)
        return torch.ops.weft.row_linear(x, weight, self.bias, group_name=self.group_name)
