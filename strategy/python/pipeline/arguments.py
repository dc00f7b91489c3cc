"""Checks the arguments of a pipeline: whether they are valid, and whether they are equal on all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from weft.strategy._plan import Schedule
from weft.strategy.pipeline.links import links_enabled

PIPELINE_AXIS = "pipeline_parallel"


def shares_of(
    schedule: str | Schedule, num_micro_batches: int | None, shares: Sequence[float] | None, num_ranks: int
) -> tuple[float, ...]:
    """Return the relative sizes of a step's micro-batches, from their number, their shares, or neither.

    Raises:
        ValueError: both are given, the number is not a whole number from 1 on, `shares` is empty, or a share is not a
            finite number above 0.
    """
    if shares is not None:
        if num_micro_batches is not None:
            raise ValueError(
                f"pipeline: got num_micro_batches={num_micro_batches!r} and micro_batch_shares={shares!r}; pass one of "
                "the two."
            )
        try:
            given = tuple(float(share) for share in shares)
        except (TypeError, ValueError, OverflowError):
            given = ()
        if not given or not all(0 < share < math.inf for share in given):
            raise ValueError(f"pipeline: micro_batch_shares is {shares!r}; pass numbers above 0, such as [1, 2, 1].")
        return given
    if num_micro_batches is None:
        return (1.0,) * (2 * num_ranks if isinstance(schedule, str) else schedule.num_micro_batches)
    if not isinstance(num_micro_batches, int) or isinstance(num_micro_batches, bool) or num_micro_batches < 1:
        raise ValueError(f"pipeline: num_micro_batches is {num_micro_batches!r}; pass a whole number from 1 on.")
    return (1.0,) * num_micro_batches


def pipeline_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the group of a mesh's pipeline axis, or of its only axis."""
    if mesh.ndim == 1:
        return mesh.get_group()
    if PIPELINE_AXIS not in (mesh.mesh_dim_names or ()):
        raise ValueError(
            f"pipeline: the mesh has the axes {mesh.mesh_dim_names}; pass a mesh of one axis, or one with an axis "
            f"named {PIPELINE_AXIS!r}."
        )
    return mesh.get_group(PIPELINE_AXIS)


def check_equal_arguments(
    group: dist.ProcessGroup, cuts: Sequence[str], schedule: str, shares: tuple[float, ...]
) -> None:
    """Raise ValueError if the arguments, or WEFT_PIPELINE_LINKS, differ between ranks; collective.

    Cuts, for example, differ if each rank chooses them by its own measurements.
    """
    if group.size() == 1:
        return
    local = (
        ("cuts", list(cuts)),
        ("schedule", schedule),
        ("micro_batch_shares", shares),
        ("WEFT_PIPELINE_LINKS", "always" if links_enabled() else "never"),
    )
    gathered: list[Any] = [None] * group.size()
    dist.all_gather_object(gathered, local, group=group)
    for rank, other in enumerate(gathered):
        for (what, here), (_, there) in zip(gathered[0], other, strict=True):
            if here != there:
                raise ValueError(
                    f"pipeline: rank 0 got the {what} {here!r} and rank {rank} {there!r}; choose them on one rank "
                    "and broadcast them."
                )
