"""The loader: a library built for another torch raises a clear ImportError, not an undefined symbol error."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

import weft
from weft._library import check_build

BUILD = {"torch": "2.15.0", "torch_cuda": "13.2", "cuda_sources": True}


@pytest.mark.parametrize(
    ("torch_version", "torch_cuda", "cuda_fits"),
    [("2.15.0+cu132", "13.2", True), ("2.15.0+cpu", None, False), ("2.15.0", "13.0", False)],
)
def test_same_release_is_accepted(torch_version: str, torch_cuda: str | None, cuda_fits: bool) -> None:
    assert check_build(BUILD, torch_version, torch_cuda) is cuda_fits


@pytest.mark.parametrize("torch_version", ["2.14.1+cu132", "2.15.1", "3.0.0"])
def test_other_release_raises(torch_version: str) -> None:
    with pytest.raises(ImportError) as error:
        check_build(BUILD, torch_version, "13.2")
    assert str(error.value) == (
        f"weft was built for torch 2.15.0 and this process has torch {torch_version}: install that torch, or "
        "build weft again for this one: run `pip install --no-build-isolation .` in weft's source folder "
        "(or `make build`)."
    )


def test_build_without_cuda_sources_loads_no_cuda_library() -> None:
    assert check_build({**BUILD, "cuda_sources": False}, "2.15.0", "13.2") is False


def test_operators_have_kernels_for_each_dispatch_key() -> None:
    for name in ("column_row_mlp", "column_linear", "row_linear", "vocab_parallel_embedding"):
        for key in ("CPU", "CUDA", "Meta", "Autograd", "AutocastCPU"):
            registered = torch._C._dispatch_has_kernel_for_dispatch_key(f"weft::{name}", key)
            assert registered or (name, key) == ("vocab_parallel_embedding", "AutocastCPU"), (name, key)


def test_cuda_library_exports_no_launches() -> None:
    library = Path(weft.__file__).parent / "lib" / "libweft_ops_cuda.so"
    if not library.exists():
        pytest.skip("this build has no CUDA sources")
    symbols = subprocess.run(["nm", "-D", "--defined-only", str(library)], capture_output=True, text=True, check=True)
    assert "launch" not in symbols.stdout
