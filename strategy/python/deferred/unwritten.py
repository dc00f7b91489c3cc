"""Detects small uninitialised tensors: those that were created as usual, not deferred, and never written to."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch

_BYTE = 0xFF  # a floating element of such bytes is a NaN with all bits set, which no kernel computes from other values
_MAX_BYTES = 1 << 20


def mark_unwritten(made: Tensor) -> Tensor:
    """Fill an uninitialised tensor with marker values, by which `is_unwritten` detects that nothing was written to it.

    Only for small CPU tensors: filling a large one would allocate pages that may never be used.
    """
    if _is_plain(made) and made.nbytes <= _MAX_BYTES:
        with no_dispatch():
            made.untyped_storage().fill_(_BYTE)  # type: ignore[attr-defined]  # torch does not declare it
    return made


def is_unwritten(tensor: Tensor) -> bool:
    """Return whether a tensor still has the values of `mark_unwritten`; for floating types only.

    A conversion of such a tensor to another dtype is not recognised; a copy in the same dtype is.
    """
    if not _is_plain(tensor) or not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    if tensor.nbytes > _MAX_BYTES or tensor.numel() == 0:
        return False
    values = tensor.detach().reshape(-1)
    return all(bool((elements.view(torch.uint8) == _BYTE).all()) for elements in (values[:1], values))


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is a plain strided CPU tensor without pending operations or a special subclass."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )
