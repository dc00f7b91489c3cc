"""nn.RMSNorm and nn.LayerNorm over the last dim, for full inputs or for shards of a sequence."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) * weight over the last dim: `[..., dim]` -> `[..., dim]`.

    Args:
        dim: size of the last dim of x.
        eps: added to the mean of the squares.
        elementwise_affine: whether there is a weight `[dim]`; it is initialised to ones and replicated on every rank.
        group_name: c10d name of the group over which the tokens of x are sharded; the backward sums the gradients of
            the parameters over this group. "" if every rank has all tokens.
        device, dtype: of the parameters.
    """

    def __init__(
        self,
        dim: int,
        eps: float = 1e-6,
        elementwise_affine: bool = True,
        *,
        group_name: str,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.eps = eps
        self.group_name = group_name
        self.weight = nn.Parameter(torch.ones(dim, device=device, dtype=dtype)) if elementwise_affine else None

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.weft.rms_norm(x, self.weight, group_name=self.group_name, eps=self.eps)

    @torch.jit.export
    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return (norm(x + residual), x + residual), both of the shape of x and residual, `[..., dim]`."""
        return torch.ops.weft.add_rms_norm(x, residual, self.weight, group_name=self.group_name, eps=self.eps)

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps}, elementwise_affine={self.weight is not None}"


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dim: `[..., dim]` -> `[..., dim]`.

    Args:
        dim, elementwise_affine, group_name, device, dtype: as in RMSNorm.
        eps: added to the variance.
        bias: whether there is a bias `[dim]`, initialised to zeros; without a weight there is none.
    """

    def __init__(
        self,
        dim: int,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        *,
        group_name: str,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.eps = eps
        self.group_name = group_name
        has_bias = elementwise_affine and bias
        self.weight = nn.Parameter(torch.ones(dim, device=device, dtype=dtype)) if elementwise_affine else None
        self.bias = nn.Parameter(torch.zeros(dim, device=device, dtype=dtype)) if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.weft.layer_norm(x, self.weight, self.bias, group_name=self.group_name, eps=self.eps)

    @torch.jit.export
    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return (norm(x + residual), x + residual), both of the shape of x and residual, `[..., dim]`."""
        return torch.ops.weft.add_layer_norm(
            x, residual, self.weight, self.bias, group_name=self.group_name, eps=self.eps
        )

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps}, elementwise_affine={self.weight is not None}, bias={self.bias is not None}"
