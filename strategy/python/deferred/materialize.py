"""Materializes deferred tensors: a shard, a full tensor, or the remaining tensors of a module."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from weft.strategy.deferred import stream
from weft.strategy.deferred.regions import region_of
from weft.strategy.deferred.tape import storage_of
from weft.strategy.deferred.tensor import DeferredTensor
from weft.strategy.deferred.unwritten import is_unwritten
from weft.strategy.deferred.views import full_region

_DEFERRED_ATTRIBUTES = ("meta", "tape", "_is_param")


def is_deferred(value: object) -> TypeGuard[DeferredTensor]:
    """Return whether a tensor is deferred."""
    return isinstance(value, DeferredTensor)


def full_value_of(tensor: DeferredTensor) -> Tensor:
    """Return the full tensor, in a new storage; the deferred tensor does not change."""
    value = _value_of(tensor)
    is_new = storage_of(tensor.meta) not in tensor.tape.materialized
    holds_more = value.untyped_storage().nbytes() != value.numel() * value.element_size()
    return value if is_new and not holds_more else value.clone(memory_format=torch.preserve_format)


def _value_of(tensor: DeferredTensor) -> Tensor:
    """Return the full tensor, which may share its storage with others."""
    storage = storage_of(tensor.meta)
    if storage in tensor.tape.materialized:
        materialized = tensor.tape.materialized[storage].detach()
        return materialized.as_strided(tensor.meta.shape, tensor.meta.stride(), tensor.meta.storage_offset())
    # A tensor that is drawn at once needs no chunks; one that is made of parts of others does not need these in full.
    is_drawn = any(entry.random is not None for entry in tensor.tape.entries_of(storage))
    if not is_drawn and tensor.meta.is_contiguous():
        values = region_of(tensor.tape, tensor.meta, tensor.device, full_region(tensor.meta.shape))
        if values is not None:
            return values
    [value] = tensor.tape.replay([tensor.meta])
    return value.detach()


def shard_of(tensor: DeferredTensor, dim: int, start: int, length: int) -> tuple[Tensor, bool]:
    """Return (`narrow(dim, start, length)` of the values, contiguous; whether no full tensor was made for it).

    A full tensor that was made for it is freed on return.
    """
    if storage_of(tensor.meta) not in tensor.tape.materialized:
        with torch.no_grad():
            made = stream.shard(tensor.tape, tensor.meta, tensor.device, dim, start, length)
        if made is None:
            region = list(full_region(tensor.meta.shape))
            region[dim] = (start, start + length)
            made = region_of(tensor.tape, tensor.meta, tensor.device, tuple(region))
        if made is not None:
            return made, True
    return _value_of(tensor).narrow(dim, start, length).clone(memory_format=torch.contiguous_format), False


def materialize(module: nn.Module) -> list[str]:
    """Materialize the deferred tensors of a module in full: parameters, buffers, and tensors in attributes.

    Attributes of exactly the types list, tuple and dict are searched, too, at any depth.

    Returns:
        The names of the materialized tensors.
    """
    made: dict[int, Tensor] = {}
    names: list[str] = []
    visiting: set[int] = set()  # containers being searched: one may contain itself

    def plain_tensor(name: str, tensor: DeferredTensor) -> Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = plain_of(tensor, full_value_of(tensor))
            names.append(name)
        return made[id(tensor)]

    def without_deferred(name: str, item: Any) -> Any:
        if is_deferred(item):
            return plain_tensor(name, item)
        if type(item) not in (list, tuple, dict) or id(item) in visiting:
            return item
        visiting.add(id(item))
        values = list(item.values()) if type(item) is dict else list(item)
        new = [without_deferred(name, each) for each in values]
        visiting.discard(id(item))
        if all(a is b for a, b in zip(new, values, strict=True)):
            return item
        return dict(zip(item, new, strict=True)) if type(item) is dict else type(item)(new)

    for module_name, owner in module.named_modules():
        prefix = f"{module_name}." if module_name else ""
        for table in (owner._parameters, owner._buffers):
            for name, item in table.items():
                if is_deferred(item):
                    table[name] = plain_tensor(prefix + name, item)
                elif isinstance(item, DTensor) and is_deferred(item._local_tensor):
                    # The constructor made a DTensor of a deferred tensor.
                    item._local_tensor = plain_tensor(prefix + name, item._local_tensor)
        for name, item in list(owner.__dict__.items()):
            if name not in ("_parameters", "_buffers", "_modules"):
                new = without_deferred(prefix + name, item)
                if new is not item:
                    owner.__dict__[name] = new
    return names


def materialize_buffers(module: nn.Module) -> None:
    """Materialize the deferred buffers, which every rank holds in full, before a plan's checks read them repeatedly."""
    made: dict[int, Tensor] = {}
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if is_deferred(buffer):
                if id(buffer) not in made:
                    made[id(buffer)] = plain_of(buffer, full_value_of(buffer))
                owner._buffers[name] = made[id(buffer)]
    for owner in module.modules() if made else ():
        for name, item in owner.__dict__.items():
            if id(item) in made and is_deferred(item):
                owner.__dict__[name] = made[id(item)]


def plain_of(tensor: DeferredTensor, value: Tensor) -> Tensor:
    """Return `value` with the attributes of the deferred tensor that it replaces; a Parameter, if that is one."""
    if isinstance(tensor, nn.Parameter):
        value = nn.Parameter(value, requires_grad=tensor.requires_grad)
    value.__dict__.update(attributes_of(tensor))
    return value


def attributes_of(tensor: Tensor) -> dict[str, Any]:
    """Return the Python attributes that were set on a tensor, without those of DeferredTensor itself."""
    return {
        name: item
        for name, item in tensor.__dict__.items()
        if name not in _DEFERRED_ATTRIBUTES or not is_deferred(tensor)
    }


def check_written(module: nn.Module) -> None:
    """Check that each parameter was created with values (`torch.zeros`), or written to afterwards.

    Parameters that are not deferred pass unless `is_unwritten` detects them.

    Raises:
        ValueError: nothing was written to some parameters; the text names them.
    """
    unwritten = [
        name
        for name, tensor in module.named_parameters()
        if (not stream.is_written(tensor.tape, tensor.meta) if is_deferred(tensor) else is_unwritten(tensor))
    ]
    if unwritten:
        raise ValueError(
            f"parallelize: nothing was written to {', '.join(repr(name) for name in unwritten)} while the model was "
            "built, so the ranks would have different values; initialise these parameters, or build the model outside "
            "of deferred_init."
        )
