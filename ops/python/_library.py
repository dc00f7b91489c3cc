"""Finds and loads the C++ operators, after checking that they were built for the installed torch.

A library built for another torch could fail later with an undefined symbol, or misbehave without an error.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

_FOLDER = Path(__file__).parent / "lib"
_BUILD_ADVICE = "run `pip install --no-build-isolation .` in weft's source folder (or `make build`)"


def _release(version: str) -> str:
    """Return the release of a torch version without its local part: 2.15.0+cu132 -> 2.15.0."""
    return version.split("+", maxsplit=1)[0]


def check_build(build: dict[str, object], torch_version: str, torch_cuda: str | None) -> bool:
    """Raise unless the library was built for this torch release; return whether it has CUDA kernels for this torch.

    Args:
        build: content of lib/build.json: `torch`, `torch_cuda` ("none" for a CPU build), `cuda_sources`.
        torch_version: `torch.__version__` of this process.
        torch_cuda: `torch.version.cuda` of this process.

    Raises:
        ImportError: the library was built for another torch release.
    """
    if build["torch"] != _release(torch_version):
        raise ImportError(
            f"weft was built for torch {build['torch']} and this process has torch {torch_version}: "
            f"install that torch, or build weft again for this one: {_BUILD_ADVICE}."
        )
    return bool(build["cuda_sources"]) and build["torch_cuda"] == torch_cuda


def load_library() -> None:
    """Load libweft_ops.so, and libweft_ops_cuda.so if it was built for this torch's CUDA.

    Raises:
        ImportError: weft is not built, weft was built for another torch release, or torch has no distributed support.
    """
    if not torch.distributed.is_available():
        raise ImportError(
            "weft needs torch.distributed and this torch was built without it: "
            "install a torch build with distributed support."
        )
    info, library = _FOLDER / "build.json", _FOLDER / "libweft_ops.so"
    if not info.is_file() or not library.is_file():
        raise ImportError(f"weft's operators are not built: {_BUILD_ADVICE}.")
    has_cuda = check_build(json.loads(info.read_text()), torch.__version__, torch.version.cuda)
    torch.ops.load_library(str(library))
    if has_cuda:
        torch.ops.load_library(str(_FOLDER / "libweft_ops_cuda.so"))
