"""Gives a loaded module the process group of this job."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def rebind_group(module: nn.Module | torch.jit.ScriptModule, group_name: str, kv_group_name: str | None = None) -> int:
    """Set `group_name` on every weft module inside `module`, scripted or not; return the number of these modules.

    Modules whose group name was "", such as norms of unsharded tokens, get the new group name, too.

    Args:
        module: an nn.Module, or a result of torch.jit.load.
        group_name: c10d name of this job's group, such as `dist.group.WORLD.group_name`; "" for a group of one.
        kv_group_name: the result of `weft.nn.kv_groups`. Required if a ParallelAttention's key/value heads are
            replicated, unless all ranks hold the same head.

    Raises:
        ValueError: there is no weft module inside, or a required `kv_group_name` is missing.
    """
    found: list[Any] = [inner for inner in module.modules() if isinstance(getattr(inner, "group_name", None), str)]
    if not found:
        raise ValueError(
            f"rebind_group: got a {type(module).__name__} with no weft module inside; "
            "pass a module that holds weft.nn modules."
        )
    names = [(inner.group_name, getattr(inner, "kv_group_name", "")) for inner in found]
    if kv_group_name is None and any(kv_name not in ("", name) for name, kv_name in names):
        raise ValueError(
            "rebind_group: got a module whose key/value heads are replicated on some of the ranks; "
            "pass kv_group_name=weft.nn.kv_groups(num_kv_heads, group_name)."
        )
    for inner, (name, kv_name) in zip(found, names, strict=True):
        inner.group_name = group_name
        if kv_name:
            inner.kv_group_name = group_name if kv_name == name else kv_group_name
    return len(found)
