"""Reads the kernels of compiled CUDA libraries with cuobjdump: their names, resources and counts of instructions."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kernels_sass import Code, Function, analyse, parse_sass

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")  # the order of weft::kernels::Activation
DTYPES = {"float": "float32", "double": "float64", "Half": "float16", "BFloat16": "bfloat16"}
STATE_FORMATS = ("float32", "bfloat16", "codes")  # the order of weft::kernels::detail::StateFormat
CODES = {"true": "int8", "false": "uint8"}  # whether codes are signed
FAMILIES = {"statistics": "cross_entropy_statistics", "gradient": "cross_entropy_gradient"}
# Packages that contain cuobjdump, and its folder in them.
PACKAGES = {"nvidia": "cu13/bin", "triton": "backends/nvidia/bin"}
# What the CUDA driver reserves at the start of a block's shared memory.
RESERVED_SHARED_BYTES = 1024


@dataclass(frozen=True)
class Kernel:
    """One kernel of one architecture."""

    arch: str
    name: str
    registers: int  # of a thread
    stack_bytes: int  # of local memory of a thread
    shared_bytes: int  # of static shared memory of a block
    code: Code

    @property
    def family(self) -> str:
        """The kernel's name without its template arguments."""
        return self.name.split()[0]

    @property
    def kept_packs(self) -> int:
        """The packs of a row that a thread keeps in registers."""
        found = re.search(r" k(\d+)", self.name)
        return int(found[1]) if found else 0


def read_kernels(libraries: Sequence[Path]) -> list[Kernel]:
    """Return all kernels of libraries, archives or object files, sorted by architecture and name.

    Raises:
        ValueError: a file or cuobjdump is missing, or a file has no kernel.
    """
    kernels: dict[Function, Kernel] = {}
    for library in libraries:
        functions = parse_sass(_cuobjdump("--dump-sass", library).splitlines())
        resources = parse_resources(_cuobjdump("--dump-resource-usage", library))
        if not functions or not functions.keys() <= resources.keys():  # cuobjdump does not print a cubin's architecture
            raise ValueError(
                f"got {library} without a kernel, expected a library, archive or object file with CUDA code: build it "
                "with nvcc on PATH (WEFT_CUDA=ON)."
            )
        for (arch, mangled), instructions in functions.items():
            kernel = Kernel(arch, kernel_name(demangle(mangled)), *resources[arch, mangled], analyse(instructions))
            if kernels.setdefault((arch, kernel.name), kernel) is not kernel:
                raise ValueError(f"got two kernels '{kernel.name}' of {arch}, expected one: pass fewer libraries.")
    return [kernels[key] for key in sorted(kernels)]


def compiler_of(libraries: Sequence[Path]) -> str:
    """Return the version of nvcc that compiled the libraries, such as 13.0.88, from the notes of the code.

    If there are several, all are in the string.
    """
    versions: set[str] = set()
    for library in libraries:
        with tempfile.TemporaryDirectory(prefix="weft-cubins-") as folder:
            _cuobjdump("--extract-elf=all", library, folder=folder)
            for cubin in Path(folder).iterdir():
                found = re.search(rb"Cuda compilation tools, release [\d.]+, V([\d.]+)", cubin.read_bytes())
                versions.add(found[1].decode() if found else "unknown")
    return ", ".join(sorted(versions))


def cuobjdump_path() -> str:
    """Return the path of cuobjdump.

    It is searched on PATH, below CUDA_HOME and CUDA_PATH, and in Python packages that contain it, such as Triton.

    Raises:
        ValueError: it is in none of these.
    """
    folders = os.get_exec_path()
    folders += [f"{os.environ[name]}/bin" for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    for package, folder in PACKAGES.items():
        spec = importlib.util.find_spec(package)
        folders += [f"{root}/{folder}" for root in (spec and spec.submodule_search_locations) or ()]
    path = shutil.which("cuobjdump", path=os.pathsep.join(folders))
    if path is None:
        raise ValueError(
            "got no cuobjdump, expected it on PATH, below CUDA_HOME or in the package triton: install CUDA's binary "
            "utilities, or `pip install triton`."
        )
    return path


def _cuobjdump(option: str, library: Path, folder: str | None = None) -> str:
    if not library.is_file():
        raise ValueError(f"got the library {library}, which does not exist: build weft, or pass --library PATH.")
    command = [cuobjdump_path(), option, str(library.resolve())]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if run.returncode != 0 and "does not contain device code" not in run.stdout + run.stderr:
        raise ValueError(f"got status {run.returncode} of {' '.join(command)}: {run.stderr.strip()}")
    return run.stdout


def parse_resources(text: str) -> dict[Function, tuple[int, int, int]]:
    """Return the registers, stack bytes and static shared bytes of each function, from --dump-resource-usage.

    Since sm_90, cuobjdump's figure of a function with shared memory includes the reserved bytes; the result does not.
    """
    resources: dict[Function, tuple[int, int, int]] = {}
    arch = "sm_0"
    for found in re.finditer(r"arch = (\w+)|Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)", text):
        if found[1]:
            arch = found[1]
        else:
            shared_bytes = int(found[5])
            if int(re.sub(r"\D", "", arch)) >= 90 and shared_bytes >= RESERVED_SHARED_BYTES:
                shared_bytes -= RESERVED_SHARED_BYTES
            resources[arch, found[2]] = (int(found[3]), int(found[4]), shared_bytes)
    return resources


def demangle(name: str) -> str:
    """Return the C++ name, by the function of the C++ runtime library, so that no binutils are needed."""
    libstdcxx, libc = ctypes.CDLL("libstdc++.so.6"), ctypes.CDLL(None)
    libstdcxx.__cxa_demangle.restype = ctypes.c_void_p
    text = libstdcxx.__cxa_demangle(name.encode(), None, None, None)
    if text is None:
        return name
    try:
        return ctypes.string_at(text).decode()
    finally:
        libc.free(ctypes.c_void_p(text))


def kernel_name(demangled: str) -> str:
    """Return a short name: the family, the activation, the dtypes, and x before the number of elements of a pack.

    A kernel of elementwise.cuh is named after its operation: 'activation silu bfloat16 x8'. Before x, the norms have k
    and the number of packs that a thread keeps in registers: 'norm_forward bfloat16 float32 k2 x8'. Optimizer steps are
    named after their job and the format of their states: 'adam_step codes x8'.
    """
    text = re.sub(r"\(anonymous namespace\)::|\w+::", "", demangled)
    found = re.match(r"(?:void )?(\w+?)(?:_kernel)?(?:<(.*)>)?\(", text)
    if found is None:
        return text
    words = [FAMILIES.get(found[1], found[1])]
    numbers = []
    for argument in re.findall(r"\(\w+\)\d+|\w+", found[2] or ""):
        if argument.endswith("Operation"):
            words[0] = argument.removesuffix("Operation").lower()
        elif argument.endswith("StepJob"):
            words[0] = f"{argument.removesuffix('StepJob').lower()}_step"
        elif argument.startswith("(StateFormat)"):
            words.append(STATE_FORMATS[int(argument.removeprefix("(StateFormat)"))])
        elif argument.startswith("(Activation)"):
            words.insert(1, ACTIVATIONS[int(argument.removeprefix("(Activation)"))])
        elif argument.isdecimal():
            numbers.append(argument)
        elif not argument.endswith("Job"):
            words.append({**DTYPES, **CODES}.get(argument, argument))
    marked = [f"{letter}{number}" for letter, number in zip("xk", numbers, strict=False)]
    return " ".join([*words, *reversed(marked)])
