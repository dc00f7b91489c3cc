"""Which small tensors with memory of their own nothing was written to."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch

_BYTE = 0xFF  # of every element: a NaN with all bits set, which no kernel makes of others
_MOST_BYTES = 1 << 20


def mark_unwritten(made: Tensor) -> Tensor:
    """Give a tensor that has any values these; what writes to it in whatever way is seen.

    Only for small CPU tensors: a large tensor would get pages that may never be used.
    """
    if _is_plain(made) and made.nbytes <= _MOST_BYTES:
        with no_dispatch():
            made.untyped_storage().fill_(_BYTE)
    return made


def is_unwritten(tensor: Tensor) -> bool:
    """Whether a tensor has the values of `mark_unwritten` still; of floating types only.

    One that was made anew from such a tensor, by a conversion to another dtype say, is not recognised.
    """
    if not _is_plain(tensor) or not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    if tensor.nbytes > _MOST_BYTES or tensor.numel() == 0:
        return False
    values = tensor.detach().reshape(-1)
    return all(bool((part.view(torch.uint8) == _BYTE).all()) for part in (values[:1], values))


def _is_plain(tensor: Tensor) -> bool:
    """On the CPU, of the usual layout, without pending operations, and no subclass that stands for something else."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )
