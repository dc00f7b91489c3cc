"""Offload: keeps in CPU memory what a module saves for the backward."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from weft.strategy.sharding.state import cached


class OffloadedModule:
    """Marks every module that offload_activations has changed."""


def offload_activations(module: nn.Module) -> None:
    """Make a module's forward save copies in CPU memory for the backward, instead of the tensors.

    The module's parameters and views of them, sparse tensors and tensors of subclasses stay on their device. A tensor
    that several operators save is copied once. Copies in both directions run on the current stream, through pinned
    memory if the device is an accelerator. CPU tensors are copied, too, which saves no memory. torch.compile skips the
    module.
    """
    if not isinstance(module, OffloadedModule):
        module.__class__ = _offloaded_class(type(module))


@cached
def _offloaded_class(cls: type[nn.Module]) -> type[nn.Module]:
    own_forward = cls.forward

    @functools.wraps(own_forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return own_forward(self, *args, **kwargs)
        with torch.autograd.graph.saved_tensors_hooks(_Copies(self).pack, _unpack):
            return own_forward(self, *args, **kwargs)

    namespace = {"__module__": cls.__module__, "forward": torch.compiler.disable(forward)}
    return type(cls.__name__, (OffloadedModule, cls), namespace)


class _Copy:
    """The values of a tensor in CPU memory."""

    def __init__(self, tensor: Tensor, origin: StorageWeakRef) -> None:
        self.device = tensor.device
        self.origin = origin  # prevents reuse of the storage's address, without keeping its memory
        is_pinned = tensor.device.type != "cpu"
        self.values = torch.empty_like(tensor, device="cpu", pin_memory=is_pinned)
        self.values.copy_(tensor, non_blocking=is_pinned)


class _Copies:
    """The copies made in one forward that a backward still needs."""

    def __init__(self, module: nn.Module) -> None:
        local = (getattr(parameter, "_local_tensor", parameter) for parameter in module.parameters())
        self._parameters = {parameter.untyped_storage()._cdata for parameter in local}
        self._copies: weakref.WeakValueDictionary[Hashable, _Copy] = weakref.WeakValueDictionary()

    def pack(self, tensor: Tensor) -> tuple[Tensor, int] | _Copy:
        is_plain = type(tensor) is Tensor and tensor.layout == torch.strided
        if not is_plain or tensor.untyped_storage()._cdata in self._parameters:
            return tensor, tensor._version
        origin = StorageWeakRef(tensor.untyped_storage())
        layout = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        key = (origin.cdata, *layout, tensor._version)
        made = self._copies.get(key)
        if made is None:
            made = self._copies[key] = _Copy(tensor.detach(), origin)
        return made


def _unpack(packed: tuple[Tensor, int] | _Copy) -> Tensor:
    if isinstance(packed, _Copy):
        return packed.values.to(packed.device, non_blocking=True)
    tensor, version = packed
    if tensor._version != version:  # autograd does not check versions if there are hooks
        raise RuntimeError(
            f"a parameter of the shape {list(tensor.shape)}, or a view of one, was changed after the forward of a "
            "module with offload and before its backward, which needs the earlier values; step after all backwards."
        )
    return tensor
