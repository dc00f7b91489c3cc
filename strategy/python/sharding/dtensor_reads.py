"""Registers reads of DTensors for which DTensor has no implementation, or a wrong one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def _item(mode: Any, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """Implement `.item()`; for a partial sum, DTensor's implementation reads the rank's own addend.

    An all-reduce here could hang, because other ranks may not read the number.

    Raises:
        ValueError: the DTensor is partial.
    """
    if any(placement.is_partial() for placement in args[0].placements):
        raise ValueError(
            f"a number was read from a DTensor with the placements {args[0].placements}, which is a partial sum on "
            "each rank; compute it inside weft.strategy.local_parameters(), or call full_tensor() on every rank first."
        )
    return func(args[0]._local_tensor)


def _is_any_true_locally(
    mode: Any, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None
) -> Tensor:
    """Implement anomaly detection's check of a gradient locally; if a rank raises at a NaN, other ranks lose a peer."""
    found: Tensor = func(args[0]._local_tensor)
    return found


torch.library.register_torch_dispatch("aten::_local_scalar_dense", DTensor, _item)
torch.library.register_torch_dispatch("aten::_is_any_true", DTensor, _is_any_true_locally)
