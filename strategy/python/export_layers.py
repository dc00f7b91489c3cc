"""Scriptable layers that take the place of parallelized ones in an exported copy, beside those of weft.nn."""

from __future__ import annotations

import torch
from torch import nn


class ColumnConv1D(nn.Module):
    """ColumnLinear with the weight of GPT-2's Conv1D, `[in, out_local]`."""

    def __init__(self, group_name: str) -> None:
        super().__init__()
        self.group_name = group_name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.weft.column_linear(x, self.weight.t(), self.bias, group_name=self.group_name)


class RowConv1D(nn.Module):
    """RowLinear with the weight of GPT-2's Conv1D, `[in_local, out]`."""

    def __init__(self, group_name: str) -> None:
        super().__init__()
        self.group_name = group_name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.weft.row_linear(x, self.weight.t(), self.bias, group_name=self.group_name)


class ColumnGatherOutput(nn.Module):
    """A linear layer with this rank's output features, whose output is gathered: `[..., in]` -> `[..., out]`."""

    def __init__(self, group_name: str, in_features: int, out_features: int, transposed: bool) -> None:
        super().__init__()
        self.group_name = group_name
        self.in_features, self.out_features = in_features, out_features
        self.transposed = transposed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight.t() if self.transposed else self.weight
        part = torch.ops.weft.column_linear(x, weight, self.bias, group_name=self.group_name)
        return torch.ops.weft.gather_from_group(part, part.dim() - 1, self.group_name, dim_size=self.out_features)


class RowSplitInput(nn.Module):
    """A linear layer with this rank's input features, whose input is whole: `[..., in]` -> `[..., out]`."""

    def __init__(self, group_name: str, in_features: int, out_features: int, transposed: bool) -> None:
        super().__init__()
        self.group_name = group_name
        self.in_features, self.out_features = in_features, out_features
        self.transposed = transposed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight.t() if self.transposed else self.weight
        part = torch.ops.weft.scatter_to_group(x, x.dim() - 1, self.group_name)
        return torch.ops.weft.row_linear(part, weight, self.bias, group_name=self.group_name)
