"""Philox4x32-10 in Python integers, and the mask of weft::dropout that it defines."""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


def philox(counter: int, key: int) -> list[int]:
    """Return four random 32-bit words."""
    c = [counter & _MASK, counter >> 32, 0, 0]
    k = [key & _MASK, key >> 32 & _MASK]
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c[0], 1 << 32)
        high1, low1 = divmod(0xCD9E8D57 * c[2], 1 << 32)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B9) & _MASK, (k[1] + 0xBB67AE85) & _MASK]
    return c


def dropout_mask(shape: torch.Size, seed: int, p: float) -> Tensor:
    """Return the mask of weft::dropout for an unsharded tensor of that shape: True for elements that are kept."""
    num_elements = shape.numel()
    words = [word for counter in range(-(-num_elements // 4)) for word in philox(counter, seed & (1 << 64) - 1)]
    return torch.tensor([word >= int(p * 2**32) for word in words[:num_elements]], dtype=torch.bool).reshape(shape)
