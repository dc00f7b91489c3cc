"""Facts about a host on which training with weft depends, and problems with what to do about them."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import resource
import socket
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

import weft
from weft.strategy.tuning.profile import profile_host
from weft.strategy.tuning.request import host_bytes

_FRONTS = ("lightning", "pytorch-lightning", "lightning-fabric")
_LEAST_OPEN_FILES = 1024
_LEAST_FREE_BYTES = 2 << 30
_INSTRUCTION_SETS = {"avx2": "AVX2", "avx512f": "AVX-512", "amx_bf16": "AMX"}


@dataclasses.dataclass(frozen=True)
class Fact:
    """One line of the report.

    Attributes:
        name: what the value describes.
        value: as text.
        problem: a sentence that says what is wrong and what to do; None: nothing is wrong.
    """

    name: str
    value: str
    problem: str | None = None


@dataclasses.dataclass(frozen=True)
class Examination:
    """The facts of a host; prints as a table with the problems below.

    Attributes:
        facts: in the order of the table.
    """

    facts: tuple[Fact, ...]

    @property
    def problems(self) -> tuple[str, ...]:
        """The sentences of all problems."""
        return tuple(fact.problem for fact in self.facts if fact.problem is not None)

    def to_dict(self) -> dict[str, Any]:
        """Return {"facts": {name: value}, "problems": [...]}."""
        return {"facts": {fact.name: fact.value for fact in self.facts}, "problems": list(self.problems)}

    def __str__(self) -> str:
        width = max(len(fact.name) for fact in self.facts)
        lines = [f"{fact.name:<{width}}  {fact.value}" for fact in self.facts]
        return "\n".join([*lines, "", *(self.problems or ("No problem was found.",))])


def examine(measures: bool = True) -> Examination:
    """Return the facts of this host.

    Args:
        measures: also start two CPU ranks, and measure their operators and collectives: half a minute.
    """
    num_cores = len(os.sched_getaffinity(0))
    facts = [
        *version_facts(),
        processor_fact(Path("/proc/cpuinfo").read_text(), num_cores),
        threads_fact(os.environ, num_cores),
        memory_fact(Path("/proc/meminfo").read_text(), host_bytes()),
        open_files_fact(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        interface_fact(os.environ, [name for _, name in socket.if_nameindex()]),
        *device_facts(),
    ]
    if measures:
        facts += _measured_facts()
    return Examination(tuple(facts))


def version_facts() -> list[Fact]:
    """Return the versions of Python, weft, torch and the installed packages of Lightning."""
    installed = {}
    for name in _FRONTS:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    problem = (
        None if installed else "No package of Lightning is installed, which weft.lightning needs; install lightning."
    )
    return [
        Fact("versions", f"Python {platform.python_version()}, weft {weft.__version__}, torch {torch.__version__}"),
        Fact("Lightning", ", ".join(f"{name} {version}" for name, version in installed.items()) or "none", problem),
    ]


def processor_fact(cpuinfo: str, num_cores: int) -> Fact:
    """Return the processor's name, the cores of this process and its instruction sets.

    Args:
        cpuinfo: the text of /proc/cpuinfo.
    """
    fields = dict(line.split(":", 1) for line in cpuinfo.splitlines() if ":" in line)
    values = {name.strip(): value.strip() for name, value in fields.items()}
    flags = set(values.get("flags", "").split())
    sets = [name for flag, name in _INSTRUCTION_SETS.items() if flag in flags]
    problem = None if sets else "The processor has no AVX2, without which kernels on CPUs are slow; use another host."
    name = values.get("model name", platform.machine())
    return Fact("processor", f"{name}, {num_cores} cores, {', '.join(sets) or 'no AVX2'}", problem)


def threads_fact(environ: Mapping[str, str], num_cores: int) -> Fact:
    """Return the number of threads of a rank."""
    given = environ.get("OMP_NUM_THREADS")
    unset = f"{num_cores} of each rank that is started without a launcher of Lightning (OMP_NUM_THREADS is not set)"
    return Fact("threads", given or unset)


def memory_fact(meminfo: str, usable: int) -> Fact:
    """Return the host's memory, that which is free, and that which this process may use.

    Args:
        meminfo: the text of /proc/meminfo.
        usable: the host's bytes, or the limit of this process's control group.
    """
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in meminfo.splitlines() if line.endswith("kB")}
    total, free = sizes["MemTotal"], sizes.get("MemAvailable", sizes["MemFree"])
    problem = None
    if free < _LEAST_FREE_BYTES:
        problem = f"Only {free / 1e9:.1f} GB of the host's memory is free; end other processes."
    limit = f", {usable / 1e9:.1f} GB for this control group" if usable < total else ""
    return Fact("memory", f"{total / 1e9:.1f} GB, {free / 1e9:.1f} GB free{limit}", problem)


def open_files_fact(limit: int) -> Fact:
    """Return the number of files that a process may open; workers of loaders and groups of many ranks need many."""
    problem = None
    if 0 <= limit < _LEAST_OPEN_FILES:
        problem = f"A process may open {limit} files, and loaders need more; run `ulimit -n {_LEAST_OPEN_FILES}`."
    return Fact("open files", "unlimited" if limit < 0 else str(limit), problem)


def interface_fact(environ: Mapping[str, str], interfaces: Collection[str]) -> Fact:
    """Return the network interface of gloo, which carries the data of CPU ranks between hosts."""
    wanted = environ.get("GLOO_SOCKET_IFNAME")
    missing = [name for name in (wanted or "").split(",") if name and name not in interfaces]
    problem = None
    if missing:
        problem = (
            f"GLOO_SOCKET_IFNAME names {', '.join(missing)}, and the interfaces are {', '.join(interfaces)}; set it to "
            "one of these."
        )
    return Fact("network", f"{', '.join(interfaces)}; GLOO_SOCKET_IFNAME: {wanted or 'not set'}", problem)


def device_facts() -> list[Fact]:
    """Return the CUDA devices that torch sees, and the version of NCCL."""
    if not torch.cuda.is_available():
        problem = None
        if Path("/dev/nvidia0").exists():
            problem = (
                "The host has an NVIDIA device, which torch does not see; install a torch of its CUDA version, and "
                "check CUDA_VISIBLE_DEVICES."
            )
        return [Fact("CUDA devices", "none", problem)]
    properties = [torch.cuda.get_device_properties(idx) for idx in range(torch.cuda.device_count())]
    devices = ", ".join(f"{each.name} ({each.total_memory / 1e9:.0f} GB)" for each in properties)
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return [Fact("CUDA devices", devices), Fact("NCCL", nccl)]


def _measured_facts() -> list[Fact]:
    try:
        found = profile_host(2)
    except (RuntimeError, TimeoutError, OSError) as error:
        text = str(error).strip().splitlines()[0]
        return [Fact("backend weft", "failed", f"Two CPU ranks cannot compute together: {text}.")]
    seconds, rate = found.host_link
    return [
        Fact("backend weft", f"{seconds * 1e6:.1f} us for a message, {rate / 1e9:.2f} GB/s between two CPU ranks"),
        Fact("a core", f"{found.float32_flops / 1e9:.0f} GFLOP/s in float32, {found.half_flops / 1e9:.0f} in bfloat16"),
    ]
