"""Copies of a small module that share its code and none of its tensors, to try its forward on."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from weft.strategy.state import original_class

_HOOK_DICTS = tuple(
    name for name, value in vars(nn.Module()).items() if "hooks" in name and isinstance(value, OrderedDict)
)


def shell_of(module: nn.Module, parameters: dict[int, Tensor], buffers: dict[int, Tensor]) -> nn.Module:
    """A copy with the module's original class, its attributes by reference, and other tensors.

    `parameters` and `buffers` map the id of each of the module's own to what takes its place. Hooks are left out: the
    copy's forward reaches nothing of the user's but the code of the module itself.
    """
    copy = object.__new__(original_class(module))
    copy.__dict__ = dict(module.__dict__)
    copy.__dict__.pop("_weft_state", None)
    for name in _HOOK_DICTS:
        copy.__dict__[name] = OrderedDict()
    copy.__dict__["_parameters"] = {
        name: None if value is None else parameters[id(value)] for name, value in module._parameters.items()
    }
    copy.__dict__["_buffers"] = {
        name: None if value is None else buffers[id(value)] for name, value in module._buffers.items()
    }
    copy.__dict__["_modules"] = {
        name: None if child is None else shell_of(child, parameters, buffers) for name, child in module._modules.items()
    }
    return copy


def buffer_copies(module: nn.Module) -> dict[int, Tensor]:
    """A copy of each buffer for `shell_of`, on the CPU, floating ones in float64."""
    return {
        id(buffer): buffer.detach().cpu().to(torch.float64 if buffer.is_floating_point() else buffer.dtype, copy=True)
        for buffer in module.buffers()
    }


def wide_range_input(dim: int, scale: float, seed: int) -> Tensor:
    """Float64 values of this scale, `[2, 3, dim]`, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 3, dim, dtype=torch.float64, generator=generator).mul_(scale)


def random_like(shape: Any, fan_in: int, seed: int) -> Tensor:
    """A float64 parameter that keeps the scale of what it is multiplied with."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator).div_(max(fan_in, 1) ** 0.5).requires_grad_()


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """The CPU's random state is as before afterwards; gradients are on, autocast is off."""
    state = torch.get_rng_state()
    try:
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
            with torch.device("cpu"):
                yield
    finally:
        torch.set_rng_state(state)


def replace_forward(module: nn.Module, forward: Callable[..., Tensor]) -> None:
    module.__dict__["forward"] = forward
