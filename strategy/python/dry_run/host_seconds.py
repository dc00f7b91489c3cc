"""Measures what this processor needs beside the kernels of operators: to map new memory, and to run FSDP2's code."""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

# glibc maps each allocation of that many bytes anew, and the kernel makes a page at its first write. Smaller ones
# mostly reuse memory that was freed. (M_MMAP_THRESHOLD in mallopt(3): the most to which glibc raises the threshold.)
MAPPED_BYTES = 32 << 20
_SAMPLES = 7
_NUM_UNITS, _FEATURES = 8, 16
_COLLECTIVES_OF_UNIT = 3  # a gather in the forward, one in the backward, and a reduction


def seconds_per_mapped_byte() -> float:
    """Return the median difference between the first write to new memory and the second one, for each byte."""
    differences = []
    for _ in range(_SAMPLES):
        memory = torch.empty(MAPPED_BYTES, dtype=torch.int8)
        start = time.perf_counter()
        memory.zero_()
        first = time.perf_counter()
        memory.zero_()
        differences.append(2 * first - start - time.perf_counter())
    return max(0.0, statistics.median(differences) / MAPPED_BYTES)


def seconds_per_sharded_collective() -> float:
    """Return the time of FSDP2's code for one of its collectives, from steps of tiny layers with and without FSDP2.

    This process must have no process group, and has none afterwards. The other rank does not exist.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        plain, sharded = _tiny_model(), _tiny_model()
        mesh = init_device_mesh("cpu", (2,))
        for unit in sharded:
            fully_shard(unit, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        difference = _seconds_of_step(sharded) - _seconds_of_step(plain)
    finally:
        dist.destroy_process_group()
    return max(0.0, difference / (_NUM_UNITS * _COLLECTIVES_OF_UNIT))


def _tiny_model() -> nn.Sequential:
    layers = (nn.Sequential(nn.Linear(_FEATURES, _FEATURES), nn.GELU()) for _ in range(_NUM_UNITS))
    return nn.Sequential(*layers)


def _seconds_of_step(model: nn.Module) -> float:
    rows = torch.zeros(1, _FEATURES)
    times = []
    for _ in range(2 + _SAMPLES):
        start = time.perf_counter()
        model(rows).sum().backward()
        model.zero_grad()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])
