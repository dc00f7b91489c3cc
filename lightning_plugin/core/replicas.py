"""Keeps ranks replicas of one another: same values along every axis, and same random numbers for the same data.

Everything here is collective over a group or a mesh, whose first rank is the one that the others follow. A group of
one is left alone.
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


def share_values(
    module: torch.nn.Module, mesh: DeviceMesh, device: torch.device, axes: Iterable[str] | None = None
) -> None:
    """Give every parameter and buffer the value of the first rank of each axis (of `axes`) that it is not cut over.

    One tensor at a time, through `device`, where the groups' backends work. Left alone: tensors that have no values
    yet.
    """
    for axis in (mesh.mesh_dim_names or ()) if axes is None else axes:
        _share_values(module, axis, mesh, device)


def _share_values(module: torch.nn.Module, axis: str, mesh: DeviceMesh, device: torch.device) -> None:
    from weft.strategy.deferred import is_deferred

    group = mesh.get_group(axis)
    if group.size() == 1:
        return
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            local = None if is_deferred(tensor) else _part_replicated_over(axis, mesh, tensor)
            if local is None or local.is_meta or local.numel() == 0:
                continue
            moved = local.detach().to(device).contiguous()
            dist.broadcast(moved, group=group, group_src=0)
            if moved.data_ptr() != local.data_ptr():
                local.copy_(moved)


def _part_replicated_over(axis: str, mesh: DeviceMesh, tensor: Tensor) -> Tensor | None:
    """What a rank holds of a tensor, if the ranks along `axis` hold the same; None where that is unknown."""
    if not isinstance(tensor, DTensor):
        return tensor
    names = tensor.device_mesh.mesh_dim_names or ("",)
    cut_over = [name for name, placement in zip(names, tensor.placements, strict=False) if not placement.is_replicate()]
    is_ours = set(names) <= set(mesh.mesh_dim_names or ())
    is_replicated = axis not in cut_over if is_ours else all(p.is_replicate() for p in tensor.placements)
    return tensor.to_local() if is_replicated else None


def has_meta_tensors(module: torch.nn.Module) -> bool:
    """Whether any parameter or buffer still waits for its values."""
    return any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


def whole_bytes(module: torch.nn.Module) -> int:
    """Bytes of the parameters that are here with all their values."""
    from weft.strategy.deferred import is_deferred

    return sum(
        parameter.nbytes
        for parameter in module.parameters()
        if not (isinstance(parameter, DTensor) or is_deferred(parameter) or parameter.is_meta)
    )


def share_random_state(group: dist.ProcessGroup, device: torch.device) -> None:
    """Continue Python's, numpy's and torch's random numbers on every rank of `group` as on its first one.

    States are copied, not seeds, so that the first rank draws what it would have drawn alone. `seed_everything`'s
    environment variables follow: data loaders and samplers read their seeds from them.
    """
    if group.size() == 1:
        return
    state = [_random_state(device) if group.rank() == 0 else None]
    dist.broadcast_object_list(state, group=group, group_src=0)
    if group.rank() != 0:
        _set_random_state(state[0], device)


@contextmanager
def random_state_of_first_rank(
    data_group: dist.ProcessGroup, tensor_group: dist.ProcessGroup, device: torch.device
) -> Iterator[None]:
    """Inside, random numbers are those of the job's first rank; afterwards, where they were others, those again.

    Ranks that see other data draw other numbers for it, unless they were seeded alike.
    """
    share_random_state(tensor_group, device)  # those draw alike afterwards, too
    own = _random_state(device)
    share_random_state(data_group, device)
    shared = _random_state(device)
    yield
    # Each generator for itself: one may be seeded alike on all ranks, and go on so, and another not.
    differing = {name: state for name, state in own.items() if not _is_same(state, shared[name])}
    _set_random_state({**_random_state(device), **differing}, device)


def _is_same(left: Any, right: Any) -> bool:
    """Return whether two states are equal; a tensor's pickle has an id of its own."""
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
    """Make the workers that `seed_everything(workers=True)` seeds draw the same on all ranks of a group.

    Lightning seeds them by global rank, with `worker_init_function` (its `pl_worker_init_function`). A function
    of the user's own is left alone.
    """
    current = getattr(dataloader, "worker_init_fn", worker_init_function)
    is_lightnings = isinstance(current, partial) and current.func is worker_init_function
    if is_lightnings or (current is None and int(os.environ.get("PL_SEED_WORKERS", "0"))):
        dataloader.worker_init_fn = partial(worker_init_function, rank=data_rank)
