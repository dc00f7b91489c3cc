"""Finds the process group over which a strategy's `all_gather`, `reduce` or `all_reduce` communicates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from weft._plugin.meshes import CONTEXT_AXIS

if TYPE_CHECKING:
    from weft._plugin.engine import Engine

WORLD = "world"


def named_group(engine: Engine, group: Any) -> Any:
    """Return the process group that the argument `group` of a collective names; other values are returned unchanged.

    Args:
        engine: of the strategy.
        group: an axis of the strategy's mesh, by its name ("tensor_parallel") or as a mesh of one axis
            (`device_mesh["tensor_parallel"]`); "context_parallel"; "world", all ranks.

    Raises:
        ValueError: there is no such axis, or the mesh has several.
    """
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"{engine.name} got a group of the {group.ndim} axes {group.mesh_dim_names}; pass a mesh of one axis, "
                "such as device_mesh['tensor_parallel'], or 'world'."
            )
        return group.get_group()
    if not isinstance(group, str):
        return group
    if group == WORLD:
        return dist.group.WORLD
    if group == CONTEXT_AXIS and engine.groups.context is not None:
        return engine.groups.context
    names = engine.mesh.mesh_dim_names or ()
    if group in names:
        return engine.mesh.get_group(group)
    known = [*names, *([CONTEXT_AXIS] if engine.groups.context is not None else []), WORLD]
    raise ValueError(f"{engine.name} got the group {group!r}; pass one of {', '.join(map(repr, known))}, or a group.")
