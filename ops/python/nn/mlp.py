"""ColumnRowMLP: a complete feed-forward block as one operator."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from weft.nn.linear import _init_like_linear
from weft.nn.shard import group_size_and_rank, shard_range

_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")


class ColumnRowMLP(nn.Module):
    """x -> act(x w1ᵀ + b1) [* (x w3ᵀ + b3)] w2ᵀ, summed over the group, + b2: `[..., dim]` -> `[..., dim]`.

    Args:
        dim: size of the last dim of x and of the result.
        hidden_dim: hidden size of the unsharded block; this rank holds its torch.chunk shard of the hidden features.
        gated: whether there is a w3 (with "silu", this is SwiGLU; with "gelu", GEGLU).
        bias: whether there are b1, b2 and, if gated, b3; b2 is replicated on every rank and added once.
        activation: "silu", "gelu", "gelu_tanh" or "relu".
        group_name: c10d name of the group; "" for a group of one.
        recompute: save only x for the backward and recompute the hidden activations.
        sequence_dim: if given, x and the result are sharded by torch.chunk along this dim; any dim but the last.
        device, dtype: of the parameters.

    Parameters `w1, w3 [hidden_local, dim]`, `w2 [dim, hidden_local]`, `b1, b3 [hidden_local]`, `b2 [dim]`.

    Raises:
        ValueError: unknown activation.
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        *,
        group_name: str,
        gated: bool = True,
        bias: bool = False,
        activation: str = "silu",
        recompute: bool = False,
        sequence_dim: int | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if activation not in _ACTIVATIONS:
            raise ValueError(f"ColumnRowMLP: got activation {activation!r}; pass one of {', '.join(_ACTIVATIONS)}.")
        num_ranks, rank = group_size_and_rank(group_name)
        _, hidden = shard_range(hidden_dim, num_ranks, rank)

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(*shape, device=device, dtype=dtype))

        self.dim = dim
        self.hidden_dim = hidden_dim
        self.activation = activation
        self.group_name = group_name
        self.recompute = recompute
        self.sequence_dim = sequence_dim
        self.w1 = parameter(hidden, dim)
        self.w2 = parameter(dim, hidden)
        self.w3 = parameter(hidden, dim) if gated else None
        self.b1 = parameter(hidden) if bias else None
        self.b2 = parameter(dim) if bias else None
        self.b3 = parameter(hidden) if bias and gated else None
        _init_like_linear(self.w1, self.b1, dim)
        _init_like_linear(self.w2, None, hidden_dim)
        if self.w3 is not None:
            _init_like_linear(self.w3, self.b3, dim)

    def forward(self, x: Tensor, sequence_size: int | None = None) -> Tensor:
        """Return `[..., dim]`; `sequence_size`: that of the unsharded `sequence_dim`; None: all shards are equal."""
        return torch.ops.weft.column_row_mlp(
            x,
            self.w1,
            self.w2,
            self.w3,
            self.b1,
            self.b2,
            self.b3,
            activation=self.activation,
            group_name=self.group_name,
            recompute=self.recompute,
            sequence_dim=self.sequence_dim,
            sequence_size=sequence_size,
        )

    def extra_repr(self) -> str:
        gated = self.w3 is not None
        return f"{self.dim}, {self.hidden_dim}, activation={self.activation!r}, gated={gated}"
