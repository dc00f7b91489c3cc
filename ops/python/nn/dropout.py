"""nn.Dropout for tensors that are whole on every rank, or cut over the group."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Dropout(nn.Module):
    """x / (1 - p), or 0 with probability p, while training: any shape.

    Args:
        p: the probability to drop an element.
        dim: the dim along which x is cut over the group; None where every rank has all of x.
        dim_size: of all parts together; without it every rank must bring as much as the others.
        group_name: c10d name of the group; "" for a group of one.

    Which elements are dropped is drawn from torch's default CPU generator, which must be in one state on the ranks of
    the group (`lightning.seed_everything` or `torch.manual_seed` with one seed): they drop what an unsharded module
    would then, and where x is whole on every rank they all drop the same.
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
        # Without dims: what is traced may have nothing else of the CPU beside tensors of a GPU.
        seed = torch.randint(0, 1 << 62, (), dtype=torch.int64, device=torch.device("cpu"))
        return torch.ops.weft.dropout(
            x, seed, p=self.p, group_name=self.group_name, dim=self.dim, dim_size=self.dim_size
        )

    def extra_repr(self) -> str:
        return f"p={self.p}, dim={self.dim}"
