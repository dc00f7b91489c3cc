"""Keeps replicas equal: values that are replicated along an axis, and random numbers of ranks with the same data.

Functions that broadcast values or states are collective over a group or a mesh, and broadcast from its first rank. On a
single rank they do nothing.
"""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

_SEED_VARIABLES = ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")


def broadcast_values(
    module: torch.nn.Module, mesh: DeviceMesh, device: torch.device, axes: Iterable[str] | None = None
) -> None:
    """Broadcast every parameter and buffer from the first rank along each axis (of `axes`) that does not shard it.

    Tensors are broadcast one at a time from and to `device`, for which the groups have a backend. Deferred and meta
    tensors, which have no values yet, are skipped.
    """
    for axis in (mesh.mesh_dim_names or ()) if axes is None else axes:
        _broadcast_values(module, axis, mesh, device)


def _broadcast_values(module: torch.nn.Module, axis: str, mesh: DeviceMesh, device: torch.device) -> None:
    from weft.strategy.deferred import is_deferred

    group = mesh.get_group(axis)
    if group.size() == 1:
        return
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            local = None if is_deferred(tensor) else _local_if_replicated(axis, mesh, tensor)
            if local is None or local.is_meta or local.numel() == 0:
                continue
            moved = local.detach().to(device).contiguous()
            dist.broadcast(moved, group=group, group_src=0)
            if moved.data_ptr() != local.data_ptr():
                local.copy_(moved)


def _local_if_replicated(axis: str, mesh: DeviceMesh, tensor: Tensor) -> Tensor | None:
    """Return the local tensor if it is replicated along `axis`; None if it is sharded, or if that is unknown."""
    if not isinstance(tensor, DTensor):
        return tensor
    names = tensor.device_mesh.mesh_dim_names or ("",)
    sharded_over = [
        name for name, placement in zip(names, tensor.placements, strict=False) if not placement.is_replicate()
    ]
    is_on_mesh = set(names) <= set(mesh.mesh_dim_names or ())
    is_replicated = axis not in sharded_over if is_on_mesh else all(p.is_replicate() for p in tensor.placements)
    return tensor.to_local() if is_replicated else None


def has_meta_tensors(module: torch.nn.Module) -> bool:
    """Return whether any parameter or buffer is a meta tensor, without values."""
    return any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


def materialized_bytes(module: torch.nn.Module) -> int:
    """Return the bytes of the parameters that are materialized in full on this rank."""
    from weft.strategy.deferred import is_deferred

    return sum(
        parameter.nbytes
        for parameter in module.parameters()
        if not (isinstance(parameter, DTensor) or is_deferred(parameter) or parameter.is_meta)
    )


def broadcast_random_state(group: dist.ProcessGroup, device: torch.device) -> None:
    """Broadcast the states of Python's, numpy's and torch's random generators from the first rank of `group`.

    States are broadcast rather than seeds, so that the first rank's random numbers do not change. `seed_everything`'s
    environment variables are broadcast, too: data loaders and samplers read their seeds from them.
    """
    if group.size() == 1:
        return
    state: list[Any] = [_random_state(device) if group.rank() == 0 else None]
    dist.broadcast_object_list(state, group=group, group_src=0)
    if group.rank() != 0:
        _set_random_state(state[0], device)


@contextmanager
def random_state_of_first_rank(
    data_group: dist.ProcessGroup, tensor_group: dist.ProcessGroup, device: torch.device
) -> Iterator[None]:
    """Inside, all ranks of both groups draw the random numbers of the first rank of all.

    Afterwards, a generator whose state differed between data-parallel ranks has its earlier state again, so that
    data-parallel ranks with different seeds draw different numbers for their data.
    """
    broadcast_random_state(tensor_group, device)  # these ranks draw the same numbers afterwards, too
    local_state = _random_state(device)
    broadcast_random_state(data_group, device)
    shared_state = _random_state(device)
    yield
    # Each generator is considered separately: one that had the first rank's state keeps its advanced state.
    differing = {name: state for name, state in local_state.items() if not _is_same(state, shared_state[name])}
    _set_random_state({**_random_state(device), **differing}, device)


def _is_same(left: Any, right: Any) -> bool:
    """Return whether two states are equal; tensors are not pickled, because pickles of equal tensors may differ."""
    return torch.equal(left, right) if isinstance(left, Tensor) else pickle.dumps(left) == pickle.dumps(right)


def _random_state(device: torch.device) -> dict[str, Any]:
    import numpy

    return {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "environment": {name: os.environ.get(name) for name in _SEED_VARIABLES},
    }


def _set_random_state(state: dict[str, Any], device: torch.device) -> None:
    import numpy

    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)
    for name, value in state["environment"].items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def seed_workers_by_data_rank(dataloader: Any, worker_init_function: Any, data_rank: int) -> None:
    """Seed a loader's workers by data rank if `seed_everything(workers=True)` was called.

    Lightning seeds workers by global rank, with `worker_init_function` (its `pl_worker_init_function`). A function that
    the user has set is kept.
    """
    current = getattr(dataloader, "worker_init_fn", worker_init_function)
    is_lightnings = isinstance(current, partial) and current.func is worker_init_function
    if is_lightnings or (current is None and int(os.environ.get("PL_SEED_WORKERS", "0"))):
        dataloader.worker_init_fn = partial(worker_init_function, rank=data_rank)
