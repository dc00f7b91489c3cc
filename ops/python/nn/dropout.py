"""nn.Dropout for tensors that are replicated on every rank, or sharded over the group."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Dropout(nn.Module):
    """x / (1 - p), or 0 with probability p, in train mode; x in eval mode. For tensors of any shape.

    Args:
        p: the probability to drop an element.
        dim: the dim along which x is sharded over the group; None if every rank has all of x.
        dim_size: the size of the unsharded `dim`. None: all shards must have equal sizes.
        group_name: c10d name of the group; "" for a group of one.

    The seed of the mask is drawn from torch's default CPU generator, whose state must be equal on all ranks of the
    group (`lightning.seed_everything` or `torch.manual_seed` with the same seed). The ranks then drop the elements that
    an unsharded module would drop, and a replicated x gets the same mask on every rank.
    """

    def __init__(self, p: float = 0.5, *, dim: int | None = None, dim_size: int | None = None, group_name: str) -> None:
        super().__init__()
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"Dropout: got p {p}; pass a probability, from 0 to 1.")
        self.p = p
        self.dim = dim
        self.dim_size = dim_size
        self.group_name = group_name

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        # The seed has no dims: a traced graph with CUDA tensors accepts no other CPU tensors.
        seed = torch.randint(0, 1 << 62, (), dtype=torch.int64, device=torch.device("cpu"))
        return torch.ops.weft.dropout(
            x, seed, p=self.p, group_name=self.group_name, dim=self.dim, dim_size=self.dim_size
        )

    def extra_repr(self) -> str:
        return f"p={self.p}, dim={self.dim}"
