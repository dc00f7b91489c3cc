"""Gives a loaded module the process group of this job."""

from __future__ import annotations

import torch
from torch import nn


def rebind_group(module: nn.Module | torch.jit.ScriptModule, group_name: str) -> int:
    """Set `group_name` on every weft module inside `module`, scripted or not; returns how many there were.

    Args:
        module: a module, or what torch.jit.load returned.
        group_name: c10d name of this job's group, such as `dist.group.WORLD.group_name`; "" for a group of one.

    Raises:
        ValueError: no weft module is inside.
    """
    found = [part for part in module.modules() if isinstance(getattr(part, "group_name", None), str)]
    if not found:
        raise ValueError(
            f"rebind_group: got a {type(module).__name__} with no weft module inside; "
            "pass a module that holds weft.nn modules."
        )
    for part in found:
        part.group_name = group_name
    return len(found)
