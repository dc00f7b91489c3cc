"""The requirements of a run: facts about the machine, and one sentence for each requirement that it lacks."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MIN_CMAKE = (3, 28)
MIN_TORCH = (2, 11)
SHARING_NCCL = (2, 30)  # the first release that lets ranks share a GPU
# Module -> the package that contains it, for the modules that parts need.
MODULES = {
    "lightning": "lightning",
    "pytest": "pytest",
    "hypothesis": "hypothesis",
    "numpy": "numpy",
    "yaml": "pyyaml",
    "pybind11": "pybind11",
}
_PYTEST_PLUGINS = ("xdist", "pytest_timeout")  # used if they are installed
_PROBE_SECONDS = 90  # the first import of torch reads gigabytes from a cold disk

# Run by the Python that will run the parts.
_TORCH_PROBE = """
import ctypes, json, torch


def nccl_version():
    "Return the version of the loaded library, which may differ from the one that torch was built with."
    library = ctypes.CDLL(None)
    if not hasattr(library, "ncclGetVersion"):  # it is not preloaded
        with open("/proc/self/maps") as maps:
            paths = [line.split()[-1] for line in maps if "/libnccl.so" in line]
        if not paths:
            return []
        library = ctypes.CDLL(paths[0])
    number = ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(number))
    return [number.value // 10000, number.value // 100 % 100, number.value % 100]


facts = {"torch": torch.__version__, "torch_cuda": torch.version.cuda, "cuda_available": torch.cuda.is_available()}
if facts["cuda_available"]:
    properties = torch.cuda.get_device_properties(0)
    facts["gpu"] = properties.name
    facts["capability"] = list(torch.cuda.get_device_capability(0))
    facts["gpu_bytes"] = properties.total_memory
    facts["multiprocessors"] = properties.multi_processor_count
    facts["num_gpus"] = torch.cuda.device_count()
    facts["nccl"] = nccl_version()
print("FACTS" + json.dumps(facts))
"""


@dataclass
class Machine:
    """Facts for the report, and what is missing.

    Attributes:
        facts: names and versions; what could not be determined is absent.
        missing: {requirement: sentence}. The requirements are those that parts name in `Part.needs`.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


def examine(environment: Mapping[str, str], device: str = "cuda") -> Machine:
    """Return the machine's facts, and the requirements of the parts that it lacks. `environment`: that of the parts."""
    machine = Machine(facts=_host_facts())
    _examine_torch(machine, environment, device)
    _examine_tools(machine, environment, device)
    found = _modules_of(environment)
    for module, package in MODULES.items():
        if module not in found:
            machine.missing[module] = f"{sys.executable} has no module {module}: install the package {package} for it."
    machine.facts["pytest_plugins"] = sorted(found & set(_PYTEST_PLUGINS))
    return machine


def tool(name: str, environment: Mapping[str, str]) -> str | None:
    """Return the path of a command in the Python interpreter's folder, as pip installs cmake and ninja, or on PATH."""
    folders = [str(Path(sys.executable).parent), environment.get("PATH", os.defpath)]
    return shutil.which(name, path=os.pathsep.join(folders))


def cuda_tool(name: str, environment: Mapping[str, str]) -> str | None:
    """Return the path of a command of the CUDA toolkit."""
    homes = [environment.get("CUDA_HOME"), environment.get("CUDA_PATH"), "/usr/local/cuda"]
    folders = [str(Path(home, part)) for home in homes if home for part in ("bin", "compute-sanitizer")]
    return tool(name, environment) or shutil.which(name, path=os.pathsep.join(folders))


def _host_facts() -> dict[str, Any]:
    facts: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "cpus": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
    }
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        names = re.findall(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
        facts["cpu"] = names[0] if names else platform.machine()
    return facts


def _examine_torch(machine: Machine, environment: Mapping[str, str], device: str) -> None:
    wanted = f"torch {MIN_TORCH[0]}.{MIN_TORCH[1]} or newer" + (" with CUDA" if device == "cuda" else "")
    try:
        run = subprocess.run(
            [sys.executable, "-c", _TORCH_PROBE],
            capture_output=True,
            text=True,
            timeout=_PROBE_SECONDS,
            check=False,
            env=dict(environment),
        )
    except subprocess.TimeoutExpired:
        machine.missing["torch"] = (
            f"{sys.executable} did not import torch within {_PROBE_SECONDS} s; {wanted} is needed: "
            "try the import by hand."
        )
        return
    found = [line for line in run.stdout.splitlines() if line.startswith("FACTS")]
    if not found:
        error = (run.stderr.strip().splitlines() or ["no error message"])[-1]
        machine.missing["torch"] = (
            f"{sys.executable} cannot import torch ({error}); {wanted} is needed: set PYTHON to a Python that has it."
        )
        return
    facts = json.loads(found[0].removeprefix("FACTS"))
    machine.facts.update(facts)
    if _numbers(facts["torch"]) < MIN_TORCH:
        machine.missing["torch"] = (
            f"got torch {facts['torch']}; {wanted} is needed: set PYTHON to a Python that has it."
        )
    elif device == "cuda" and facts["torch_cuda"] is None:
        machine.missing["torch"] = (
            f"torch {facts['torch']} is built without CUDA; {wanted} is needed: set PYTHON to a Python that has it."
        )
    elif device == "cuda" and not facts["cuda_available"]:
        machine.missing["gpu"] = (
            f"torch {facts['torch']} for CUDA {facts['torch_cuda']} finds no usable GPU; one is needed: "
            "check the driver with nvidia-smi, and CUDA_VISIBLE_DEVICES."
        )
    if device == "cuda":
        nccl = facts.get("nccl", [])
        if tuple(nccl[:2]) < SHARING_NCCL:
            wanted = ".".join(map(str, SHARING_NCCL))
            machine.missing["shared_gpu"] = (
                f"got NCCL {'.'.join(map(str, nccl)) or 'of no version'}; {wanted} or newer is needed for ranks that "
                "share a GPU: preload a newer libnccl.so.2."
            )
        driver = _output_of(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"], environment
        )
        if driver:
            machine.facts["driver"] = driver.strip()


def _examine_tools(machine: Machine, environment: Mapping[str, str], device: str) -> None:
    missing = machine.missing
    cmake = tool("cmake", environment)
    needed_cmake = f"cmake {MIN_CMAKE[0]}.{MIN_CMAKE[1]} or newer"
    if cmake is None:
        missing["cmake"] = f"there is no cmake on PATH; {needed_cmake} is needed: install it."
    else:
        version = _output_of([cmake, "--version"], environment) or ""
        machine.facts["cmake"] = version.splitlines()[0].removeprefix("cmake version ") if version else "unknown"
        if _numbers(machine.facts["cmake"]) < MIN_CMAKE:
            missing["cmake"] = f"got cmake {machine.facts['cmake']}; {needed_cmake} is needed: install it."
    if tool("ninja", environment) is None:
        missing["ninja"] = "there is no ninja on PATH; CMake's presets need it: install it."
    compiler = environment.get("CXX", "c++")
    if tool(compiler, environment) is None:
        missing["compiler"] = f"there is no compiler {compiler}; one for C++20 is needed: install it, or set CXX."
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.is_file():
        missing["python_headers"] = f"there is no {header}; it is needed for Python modules: install Python's headers."
    if device != "cuda":
        return
    nvcc = cuda_tool("nvcc", environment)
    torch_cuda = machine.facts.get("torch_cuda")
    release = (
        re.search(r"release ([0-9]+\.[0-9]+)", _output_of([nvcc, "--version"], environment) or "") if nvcc else None
    )
    if nvcc is None:
        missing["nvcc"] = "there is no nvcc on PATH or in CUDA_HOME/bin; it is needed: install the CUDA toolkit."
    elif release is None:
        missing["nvcc"] = f"{nvcc} --version prints no release; nvcc of a CUDA toolkit is needed: put it on PATH."
    else:
        machine.facts["nvcc"] = release[1]
        if torch_cuda is not None and release[1].split(".")[0] != torch_cuda.split(".")[0]:
            missing["nvcc"] = (
                f"got nvcc {release[1]} and torch for CUDA {torch_cuda}; both must have the same major release: "
                f"put the nvcc of CUDA {torch_cuda.split('.')[0]} on PATH."
            )
    if cuda_tool("compute-sanitizer", environment) is None:
        missing["compute-sanitizer"] = (
            "there is no compute-sanitizer on PATH or in CUDA_HOME; it is needed for memcheck and racecheck: "
            "install the CUDA toolkit's."
        )


def _modules_of(environment: Mapping[str, str]) -> set[str]:
    """Return which of the modules Python finds, without importing them."""
    names = [*MODULES, *_PYTEST_PLUGINS]
    code = f"import importlib.util; print(*[name for name in {names!r} if importlib.util.find_spec(name)])"
    return set((_output_of([sys.executable, "-c", code], environment) or "").split())


def _output_of(command: list[str], environment: Mapping[str, str]) -> str | None:
    """Return the standard output of a command, None if it fails."""
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, env=dict(environment))
    except (OSError, subprocess.TimeoutExpired):
        return None
    return run.stdout if run.returncode == 0 else None


def _numbers(version: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)
