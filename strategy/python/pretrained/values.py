"""LazyTensor: a tensor of a sharded model whose full values are assembled when they are needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from weft.strategy.deferred import is_deferred


@dataclass(frozen=True)
class LazyTensor:
    """A full tensor that does not exist yet.

    Attributes:
        shape: of the full tensor.
        dtype: of the full tensor.
        device: where the full tensor will be.
        has_no_values: it is deferred or on the meta device.
        assemble: returns the full tensor without its conversion to `dtype`; collective over the ranks that hold it.
        group: tensors of equal groups that follow each other are assembled from the same tensors; "": no other one is.
        free: frees what is kept for other tensors of the group.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    has_no_values: bool
    assemble: Callable[[], Tensor]
    group: str = ""
    free: Callable[[], None] = lambda: None

    @staticmethod
    def of(tensor: Tensor, dtype: torch.dtype | None) -> LazyTensor:
        """Return a parameter or buffer as a LazyTensor of `dtype`, unless it is no floating-point tensor."""
        local: Tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        value = tensor.detach()
        return LazyTensor(
            tuple(tensor.shape),
            dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype,
            local.device,
            local.is_meta or is_deferred(local),
            value.full_tensor if isinstance(value, DTensor) else lambda: value,
        )

    def full(self) -> Tensor:
        """Return the full tensor; collective over the ranks that hold it."""
        with torch.no_grad():
            return self.assemble().to(self.dtype)
