"""Modules that compute in their own dtype, independent of the modules around them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only


def in_precision(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a parallelized module's forward that computes in `precision` of the module's state.

    Floating tensors among the arguments are cast to that dtype before the forward, parameters when they are read.
    Floating results are cast to the dtype of the first floating argument. If no argument is floating, or under autocast
    (which casts the inputs of later layers itself), results are cast to `precision`. Inside the forward, autocast is
    off.
    """

    @functools.wraps(forward)
    def cast_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        dtype = self._weft_state.precision
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        device_type = self._weft_state.mesh.device_type
        outer = next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), dtype)
        outer = dtype if torch.is_autocast_enabled(device_type) else outer
        args, kwargs = _in_dtype((args, kwargs), dtype)
        with torch.autocast(device_type, enabled=False):
            return _in_dtype(forward(self, *args, **kwargs), outer)

    return cast_forward


def _in_dtype(values: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, values)
