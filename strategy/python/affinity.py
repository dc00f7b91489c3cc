"""Gives each rank of a host a share of the processors, so that the kernel does not put two ranks on one processor."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

_CPUS = Path("/sys/devices/system/cpu")
Processors = frozenset[int]


def spread_ranks() -> Processors | None:
    """Restrict this process to its share of the processors that the ranks of its host may use; collective.

    The shares are equal, up to one processor, and disjoint: consecutive ranks get neighbours in the order of NUMA
    nodes, sockets and cores, so that the hardware threads of a core belong to one rank where the numbers allow it. If
    there are more ranks than processors, ranks get one each, in turn. All threads of the process are restricted, and so
    are its children from then on, such as workers of a DataLoader.

    Returns:
        The processors before, for `run_on`; None, and nothing changes: the ranks of this host may use different ones
        already, as with `numactl`, `taskset` or Slurm's `--cpu-bind`, or there is one rank.

    Raises:
        RuntimeError: there is no default process group.
    """
    if not dist.is_initialized():
        raise RuntimeError("spread_ranks got no default process group; call torch.distributed.init_process_group.")
    usable = frozenset(os.sched_getaffinity(0))
    own = (_host(), sorted(usable))
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, own)
    on_host = [rank for rank, (host, _) in enumerate(of_ranks) if host == own[0]]
    if len(on_host) == 1 or any(of_ranks[rank] != own for rank in on_host):
        return None
    run_on(share_of(sorted(usable, key=_place_of), on_host.index(dist.get_rank()), len(on_host)))
    return usable


def share_of(processors: Sequence[int], idx: int, number: int) -> Processors:
    """Return the share of the rank with index `idx` among `number` ranks: neighbours in `processors`."""
    if len(processors) < number:
        return frozenset({processors[idx % len(processors)]})
    return frozenset(processors[len(processors) * idx // number : len(processors) * (idx + 1) // number])


def run_on(processors: Collection[int]) -> None:
    """Let all threads of this process run on these processors, and on no others."""
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread), processors)


def _host() -> str:
    """Return a name that the processes of one running kernel share."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _place_of(processor: int, cpus: Path = _CPUS) -> tuple[int, int, int, int]:
    """Return (NUMA node, socket, core, processor); 0 in place of what the kernel does not tell."""
    folder = cpus / f"cpu{processor}"
    node = next((int(path.name[4:]) for path in folder.glob("node[0-9]*")), 0)
    return (node, _number(folder / "topology/physical_package_id"), _number(folder / "topology/core_id"), processor)


def _number(path: Path) -> int:
    return int(path.read_text()) if path.is_file() else 0
