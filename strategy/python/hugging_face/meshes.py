"""Checks that a mesh is ordered like Accelerate's, and that a model is sharded over its axes."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from weft.strategy.pipeline import find_staged

TP = "tp"
_AXES = ("dp_replicate", "dp_shard", TP)  # Accelerate's names, outermost first


def check_mesh(mesh: DeviceMesh) -> None:
    """Check the names of the axes and the order of the ranks, by which Accelerate distributes batches.

    Raises:
        ValueError: the axes are not some of dp_replicate, dp_shard and tp in this order, or the ranks are not all ranks
            in ascending order.
    """
    names = tuple(mesh.mesh_dim_names or ())
    if not names or names != tuple(name for name in _AXES if name in names):
        raise ValueError(
            f"the mesh has the axes {names}; name them as Accelerate does, in the order {_AXES}, and leave out those "
            "of size 1."
        )
    ranks = mesh.mesh.flatten().tolist()
    if ranks != list(range(dist.get_world_size())):
        raise ValueError(
            f"the mesh has the ranks {ranks}, and Accelerate distributes batches over all ranks in ascending order; "
            "make the mesh by init_device_mesh over all ranks."
        )


def size_of(mesh: DeviceMesh, axis: str) -> int:
    """Return the number of ranks along an axis, 1 if the mesh lacks it."""
    return mesh[axis].size() if axis in (mesh.mesh_dim_names or ()) else 1


def check_sharded(model: nn.Module, mesh: DeviceMesh) -> None:
    """Check that a model is sharded over the mesh, so that its gradients are those of all data.

    Raises:
        ValueError: the model is in pipeline stages; no parameter is on the tensor-parallel axis; or a parameter that
            requires gradients is not on the data-parallel axes.
    """
    if find_staged(model) is not None:
        raise ValueError(
            "got a model in pipeline stages, which neither the Trainer nor Accelerate runs; use Lightning."
        )
    meshes = {name: parameter.device_mesh for name, parameter in _trained(model) if isinstance(parameter, DTensor)}
    axes = {name: set(each.mesh_dim_names or ()) for name, each in meshes.items()}
    if size_of(mesh, TP) > 1 and not any(TP in each for each in axes.values()):
        raise ValueError(
            f"got a {type(model).__name__} without parameters on the axis '{TP}' of the mesh; call "
            f"weft.parallelize(model, mesh['{TP}'], plan) before."
        )
    data = tuple(name for name in mesh.mesh_dim_names or () if name != TP and size_of(mesh, name) > 1)
    for name, _ in _trained(model):
        if not axes.get(name, set()).issuperset(data):
            raise ValueError(
                f"got a {type(model).__name__} whose parameter '{name}' is not sharded over the axes {data} of the "
                "mesh, so its gradients would not be averaged; call weft.strategy.data_parallel.apply_fsdp before."
            )


def _trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
