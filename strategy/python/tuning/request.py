"""Reads what a search needs besides the training: the cluster, the memory of a device, fixed sizes."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.strategy._plan import Cluster
from weft.strategy.estimate.config import load_file
from weft.strategy.tuning.layer_times import LAYER_KEYS, read_layer_times

__all__ = ["Cluster", "host_bytes", "memory_limit_of", "read_bytes", "read_cluster", "read_fixed"]

# The share of a device's memory that a layout may take: the rest is for the allocator's fragments, workspaces of
# libraries and the context of the device. The memory of a CPU rank is limited to the byte.
_USABLE = {True: 0.9, False: 1.0}
_UNITS = {"": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "MiB": 2**20, "GiB": 2**30}
_HOSTS = ("copy_bytes_per_second", "host_bytes_per_second", "host_bytes")
# Keys of a cluster's file: those of `Cluster` that are numbers, and both links.
_NUMBERS = (
    "devices_per_host",
    "cores_per_host",
    "device_bytes",
    "float32_flops",
    "half_flops",
    "bytes_per_second",
    "seconds_per_kernel",
    "seconds_per_wait",
    *_HOSTS,
)
_COUNTS = ("devices_per_host", "device_bytes", "host_bytes")
_LINKS = ("host_link", "network_link")
_LINK_KEYS = ("seconds_per_message", "bytes_per_second")
_FIXED = {
    "pp": "pipeline_parallel",
    "rep": "data_replicate",
    "dp": "data_parallel",
    "tp": "tensor_parallel",
    "accumulate": "accumulate_grad_batches",
    "zero": "zero_stage",
}


def read_cluster(value: str | Mapping[str, Any], folder: Path = Path()) -> Cluster:
    """Return a cluster by its name, or from a mapping or the YAML or JSON file of one.

    A mapping has the key "like", the name of a cluster, and the rates that differ from it; with the keys of
    `read_layer_times`, also measured layer times.

    Raises:
        ValueError: the name is unknown, there is no such file, or the mapping is not valid.
    """
    if isinstance(value, str):
        if value in Cluster.names():
            return Cluster(value)
        if "." not in value and "/" not in value:
            return Cluster(value)  # raises, with the valid names
        value = load_file(folder / value)
    keys = ("like", "overlaps", *_NUMBERS, *_LINKS, *LAYER_KEYS)
    if not isinstance(value, Mapping) or "like" not in value or set(value) - set(keys):
        raise ValueError(
            f"tune: the cluster is {value!r}; give a mapping with 'like', and any of {', '.join(keys[1:])}."
        )
    cluster = Cluster(str(value["like"]))
    for key in set(value) & {"overlaps", *_NUMBERS}:
        number = value[key]
        is_switch = key == "overlaps"
        if isinstance(number, bool) != is_switch or not isinstance(number, (int, float)) or number < 0:
            kind = "true or false" if is_switch else "a number from 0"
            raise ValueError(f"tune: the cluster has {key} = {number!r}; give {kind}.")
        setattr(cluster, key, int(number) if key in _COUNTS else number)
    for key in set(value) & set(_LINKS):
        link = value[key]
        if not isinstance(link, Mapping) or set(link) != set(_LINK_KEYS):
            raise ValueError(f"tune: the cluster has {key} = {link!r}; give {' and '.join(_LINK_KEYS)}.")
        setattr(cluster, key, tuple(float(link[name]) for name in _LINK_KEYS))
    _check_rates(cluster)
    cluster.layer_times = read_layer_times(value)
    return cluster


def _check_rates(cluster: Cluster) -> None:
    rates = {
        "devices_per_host": cluster.devices_per_host,
        "device_bytes": cluster.device_bytes,
        "float32_flops": cluster.float32_flops,
        "half_flops": cluster.half_flops,
        "bytes_per_second": cluster.bytes_per_second,
        "bytes_per_second of host_link": cluster.host_link[1],
        "bytes_per_second of network_link": cluster.network_link[1],
    }
    if cluster.name != "cpu":  # whose CPU memory is that of its devices
        rates |= {name: getattr(cluster, name) for name in _HOSTS}
    for name, rate in rates.items():
        if rate <= 0:
            raise ValueError(f"tune: the cluster has {name} = {rate!r}; give a number above 0.")


def host_bytes() -> int:
    """Return the memory of this host, or the limit of this process's control group, if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    path = Path("/sys/fs/cgroup/memory.max")
    text = path.read_text().strip() if path.is_file() else "max"
    return min(total, int(text)) if text.isdigit() else total


def memory_limit_of(cluster: Cluster, memory: str | int | None) -> int:
    """Return the bytes that a layout may take: those given, or the usable share of a device's memory."""
    if memory is not None:
        return read_bytes(memory)
    return int(cluster.device_bytes * _USABLE[cluster.name != "cpu"])


def read_bytes(value: str | int) -> int:
    """Return a number of bytes, such as 80GB, 75GiB or 80000000000.

    Raises:
        ValueError: another text, or a number below 1.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(value))
    num_bytes = int(float(match[1]) * _UNITS[match[2]]) if match and match[2] in _UNITS else 0
    if num_bytes < 1:
        raise ValueError(f"tune: got the memory {value!r}; give a number of bytes, such as 80GB or 75GiB.")
    return num_bytes


def read_fixed(text: str) -> dict[str, int]:
    """Return the fixed sizes, by the name of the axis, of text such as "dp=4,tp=2" or "accumulate=1".

    Raises:
        ValueError: another text.
    """
    fixed = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(r"(\w+)\s*=\s*(\d+)", part)
        least = 0 if match is not None and match[1] == "zero" else 1
        if match is None or match[1] not in _FIXED or int(match[2]) < least:
            raise ValueError(f"tune: got the fixed size {part!r}; give {', '.join(_FIXED)} with a number, as in tp=2.")
        fixed[_FIXED[match[1]]] = int(match[2])
    return fixed
