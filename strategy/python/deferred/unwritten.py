"""Which tensors with memory of their own nothing was written to."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch

_BYTE = 0xFF  # all of it a NaN with every bit set, which no arithmetic makes


def mark_unwritten(made: Tensor) -> Tensor:
    """Give a tensor that has any values these; what writes to it in whatever way is seen."""
    if _is_plain(made):
        with no_dispatch():
            made.untyped_storage().fill_(_BYTE)
    return made


def is_unwritten(tensor: Tensor) -> bool:
    """Whether a tensor has the values of `mark_unwritten` still; of floating types only."""
    if not _is_plain(tensor) or not (tensor.is_floating_point() or tensor.is_complex()) or tensor.numel() == 0:
        return False
    values = tensor.detach().reshape(-1)
    return all(bool((part.view(torch.uint8) == _BYTE).all()) for part in (values[:1], values))


def _is_plain(tensor: Tensor) -> bool:
    """Not of another layout, on the meta device, or a subclass that stands for something else."""
    is_own = type(tensor) in (Tensor, torch.nn.Parameter)
    return is_own and tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_quantized
