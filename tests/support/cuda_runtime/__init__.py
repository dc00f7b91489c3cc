"""Runs tests that need a CUDA device on a CUDA runtime without one; README.md says what it models.

    python -m support.cuda_runtime -m pytest -m cuda tests

starts Python on the runtime. `load()` then gives torch's and weft's operators on CUDA tensors versions that compute on
the host; conftest.py, the ranks of `support.ranks` and the processes of `support.processes` call it.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

LIBRARIES = Path(__file__).resolve().parents[3] / "build/dev/tests/cuda_runtime"
_RUNTIME = LIBRARIES / "libweft_cuda_runtime.so"
_FOLDER = Path(__file__).parent


def is_built() -> bool:
    """Return whether the build has the runtime, which needs the headers of CUDA."""
    return _RUNTIME.is_file()


def is_active() -> bool:
    """Return whether this process runs on the runtime."""
    return "WEFT_CUDA_RUNTIME" in os.environ


def environment(*, devices: int = 8, delay_ms: int = 5, skip_kernels: bool = False) -> dict[str, str]:
    """Return the variables that give a new process the runtime.

    Args:
        devices: the number of devices.
        delay_ms: milliseconds that each work item waits, unless the host or another stream needs it; 0: streams run in
            parallel.
        skip_kernels: kernels and copies to a device do nothing, so that its memory is zero: for measuring memory.
    """

    def prepended(name: str, folder: Path) -> str:
        return os.pathsep.join([str(folder), *filter(None, [os.environ.get(name)])])

    return {
        "WEFT_CUDA_RUNTIME": "1",
        "WEFT_CUDA_RUNTIME_DEVICES": str(devices),
        "WEFT_CUDA_RUNTIME_DELAY_MS": str(delay_ms),
        "WEFT_CUDA_RUNTIME_SKIP_KERNELS": str(int(skip_kernels)),
        "LD_PRELOAD": str(_RUNTIME),
        "LD_LIBRARY_PATH": prepended("LD_LIBRARY_PATH", LIBRARIES),
        "PATH": prepended("PATH", _FOLDER),  # for nvidia-smi
    }


def load() -> None:
    """Load the host's versions of CUDA operators, if this process runs on the runtime. Call after `import weft`."""
    if not is_active() or os.environ["WEFT_CUDA_RUNTIME_SKIP_KERNELS"] == "1":
        return
    import torch

    torch.ops.load_library(str(LIBRARIES / "libweft_host_operators.so"))
    # Kernels that only a device can run: torch uses its other operators instead.
    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch._C._jit_override_can_fuse_on_gpu(False)


class _LoadAfterWeft(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the package weft as usual, and then calls `load()`."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "weft":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        self._loader = spec.loader
        spec.loader = self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        load()


def load_after_weft() -> None:
    """Arrange for `load()` to be called as soon as this process has imported weft."""
    sys.meta_path.insert(0, _LoadAfterWeft())


def count(name: str) -> int:
    """Return how often `name` has happened in this process: see `weftCudaRuntimeCount` in runtime.h."""
    call = ctypes.CDLL(str(_RUNTIME)).weftCudaRuntimeCount
    call.restype = ctypes.c_int64
    return call(name.encode())


@contextmanager
def delay(milliseconds: int) -> Iterator[None]:
    """Change the delay of `environment()` in this process, for tests whose result must not depend on time."""
    call = ctypes.CDLL(str(_RUNTIME)).weftCudaRuntimeSetDelay
    before = call(milliseconds)
    try:
        yield
    finally:
        call(before)
