"""Converts between the stacked parameters of a list's experts and tensors of single experts, as state dicts have them.

A stack `[experts, ...]` is sharded by experts. In a state dict, the tensor of one expert is a DTensor of its unsharded
shape on the same axis, sharded along dim 0: each rank has some rows of every expert. So names, shapes and values are
those of the unsharded model on each rank, and all code that gathers, saves or reads DTensors works with them. The cost
is an all-to-all for each stack and a copy of this rank's experts, for as long as the state dict exists.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from weft.strategy._plan import shard_range


class Stacks(Protocol):
    """The members of `list_modules.StackedExperts` that this module uses."""

    names: list[str]
    _weft_experts: Any

    def stack_of(self, name: str) -> nn.Parameter: ...


def split_entries(entries: dict[str, Any], stacked_prefix: str, prefix: str, stacks: Stacks) -> dict[str, Any]:
    """Return a state dict in which the stacks below `stacked_prefix` are entries of single experts; collective."""
    state = stacks._weft_experts
    of_experts: list[dict[str, Tensor]] = [{} for _ in range(state.num_experts)]
    for name in stacks.names:
        for of_expert, value in zip(of_experts, split(entries.pop(stacked_prefix + name), state.mesh), strict=True):
            of_expert[name] = value
    for idx, of_expert in enumerate(of_experts):
        entries.update({f"{prefix}{idx}.{name}": value for name, value in of_expert.items()})
    return entries


def join_entries(entries: dict[str, Any], stacked_prefix: str, prefix: str, stacks: Stacks) -> None:
    """Replace the entries of single experts in a state dict by stacks, in place; collective if they are DTensors.

    If an expert lacks a tensor, or has one of another shape, the entries stay: loading then raises an error.
    """
    state = stacks._weft_experts
    for name in stacks.names:
        keys = [f"{prefix}{idx}.{name}" for idx in range(state.num_experts)]
        stack = stacks.stack_of(name)
        if all(key in entries and entries[key].shape == stack.shape[1:] for key in keys):
            entries[stacked_prefix + name] = join([entries.pop(key) for key in keys], stack, state.mesh)


@torch.no_grad()
def split(stack: Tensor, mesh: DeviceMesh) -> list[DTensor]:
    """Return the tensor of each expert, with rows of it on each rank; collective.

    Args:
        stack: a DTensor `[experts, ...]`, sharded along dim 0 over the axis of `mesh` and possibly others.
        mesh: the axis over which the experts are sharded.
    """
    assert isinstance(stack, DTensor)
    own, shape = _own_experts(stack, mesh), stack.shape[1:]
    if own.is_meta or mesh.size() == 1:
        rows = own
    elif not shape:
        rows = _gathered(own, mesh.get_group(), [length for _, length in _shards(stack.shape[0], mesh)])
    else:
        rows = torch.cat(_exchange(own.split([n for _, n in _shards(shape[0], mesh)], 1), _experts_first(stack, mesh)))
    placement = Shard(0) if shape else Replicate()
    stride = torch.empty(shape, device="meta").stride()
    if own.is_meta:
        rows = torch.empty((stack.shape[0], *_local_shape(shape, mesh)), dtype=own.dtype, device="meta")
    return [
        DTensor.from_local(each, mesh, [placement], run_check=False, shape=shape, stride=stride)
        for each in rows.unbind(0)
    ]


@torch.no_grad()
def join(values: Sequence[Tensor], stack: Tensor, mesh: DeviceMesh) -> DTensor:
    """Return the tensors of all experts as one that is sharded like `stack`; collective if they are DTensors.

    `values`: full tensors, equal on all ranks, or DTensors as `split` returns them.
    """
    assert isinstance(stack, DTensor)
    start, length = shard_range(len(values), mesh.size(), mesh.get_local_rank())
    if not stack.shape[1:] or mesh.size() == 1 or not isinstance(values[0], DTensor):
        own = torch.stack([_local(value) for value in values[start : start + length]])
    else:
        rows = torch.stack([_local(value) for value in values])
        shards = _shards(len(values), mesh)
        shape = values[0].shape
        received = [(length, n, *shape[1:]) for _, n in _shards(shape[0], mesh)]
        own = torch.cat(_exchange(rows.split([n for _, n in shards]), (mesh, received)), 1)
    axes = stack.device_mesh
    for axis in _other_axes(stack, mesh):
        own = own.narrow(0, *shard_range(own.shape[0], axes.size(axis), axes.get_local_rank(axis)))
    local = torch.empty_like(stack._local_tensor, dtype=own.dtype).copy_(own)
    # Not by from_local, which would move an offloaded shard to the mesh's device.
    spec = DTensorSpec(axes, stack.placements, tensor_meta=TensorMeta(stack.shape, stack.stride(), local.dtype))
    return DTensor(local, spec, requires_grad=False)


def empty_like_split(shape: torch.Size, dtype: torch.dtype, mesh: DeviceMesh, device: torch.device) -> DTensor:
    """Return the tensor of one expert, as `split` returns it, without values."""
    local = torch.empty(_local_shape(shape, mesh), dtype=dtype, device=device)
    stride = torch.empty(shape, device="meta").stride()
    placement = Shard(0) if shape else Replicate()
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=shape, stride=stride)


def _local_shape(shape: Sequence[int], mesh: DeviceMesh) -> tuple[int, ...]:
    if not shape:
        return ()
    return (shard_range(shape[0], mesh.size(), mesh.get_local_rank())[1], *shape[1:])


def _own_experts(stack: DTensor, mesh: DeviceMesh) -> Tensor:
    """Return all experts that this rank of `mesh` holds: gathered over the ranks among which FSDP2 shards them."""
    own = stack._local_tensor.to(mesh.device_type) if not stack.is_meta else stack._local_tensor
    num_own = shard_range(stack.shape[0], mesh.size(), mesh.get_local_rank())[1]
    for axis in _other_axes(stack, mesh) if not stack.is_meta else ():
        size = stack.device_mesh.size(axis)
        lengths = [shard_range(num_own, size, idx)[1] for idx in range(size)]
        own = _gathered(own, stack.device_mesh.get_group(axis), lengths)
    return own.contiguous()


def _gathered(local: Tensor, group: dist.ProcessGroup, lengths: Sequence[int]) -> Tensor:
    """Return the rows of all ranks, of which each has one of these numbers."""
    if len(lengths) == 1:
        return local
    padded = local.new_zeros(max(lengths), *local.shape[1:])
    padded[: len(local)] = local
    gathered = padded.new_empty(len(lengths) * len(padded), *local.shape[1:])
    dist.all_gather_into_tensor(gathered, padded, group=group)
    chunks = gathered.split(len(padded))
    return torch.cat([chunk[:length] for chunk, length in zip(chunks, lengths, strict=True)])


def _exchange(sent: Iterable[Tensor], received: tuple[DeviceMesh, Sequence[tuple[int, ...]]]) -> list[Tensor]:
    """Send a tensor to each rank of a mesh; return those that arrive, which have these shapes."""
    mesh, shapes = received
    flat = [each.reshape(-1) for each in sent]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    buffer = flat[0].new_empty(sum(sizes))
    dist.all_to_all_single(buffer, torch.cat(flat), sizes, [each.numel() for each in flat], group=mesh.get_group())
    return [each.view(shape) for each, shape in zip(buffer.split(sizes), shapes, strict=True)]


def _experts_first(stack: DTensor, mesh: DeviceMesh) -> tuple[DeviceMesh, list[tuple[int, ...]]]:
    """Return the shapes of the rows of this rank that the ranks of a mesh send, for their experts."""
    shape = _local_shape(stack.shape[1:], mesh)
    return mesh, [(length, *shape) for _, length in _shards(stack.shape[0], mesh)]


def _shards(size: int, mesh: DeviceMesh) -> list[tuple[int, int]]:
    """Return the first index and the length of the shard of each rank."""
    return [shard_range(size, mesh.size(), rank) for rank in range(mesh.size())]


def _other_axes(stack: DTensor, mesh: DeviceMesh) -> list[int]:
    """Return the axes besides that of `mesh` over which a stack is sharded: one at most, by FSDP2."""
    if stack.device_mesh.ndim == 1:
        return []
    assert mesh.mesh_dim_names is not None and stack.device_mesh.mesh_dim_names is not None
    [own_name], names = mesh.mesh_dim_names, stack.device_mesh.mesh_dim_names
    axes = [
        axis
        for axis, placement in enumerate(stack.placements)
        if not placement.is_replicate() and names[axis] != own_name
    ]
    assert len(axes) <= 1
    return axes


def _local(value: Tensor) -> Tensor:
    return value._local_tensor if isinstance(value, DTensor) else value.detach()
