"""The installed tree: every public header compiles alone, a program links and runs, another torch raises an error."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import weft
from support.installed import BUILD, build_project, configure, install
from support.processes import run_process

SOURCE = Path(__file__).parent / "installed"
TORCH = Path(torch.__file__).parent
RELEASE = torch.__version__.split("+", maxsplit=1)[0]


@pytest.fixture(scope="module")
def prefix() -> Path:
    return install(BUILD / "installed" / "headers")


def test_public_headers_compile_alone_and_program_runs(prefix: Path) -> None:
    headers = sorted(str(path.relative_to(prefix / "include")) for path in (prefix / "include").rglob("*.h"))
    ops_headers = {f"weft/ops/{name}.h" for name in ("backend", "export", "memory", "operators", "script")}
    assert ops_headers <= set(headers)
    # The build folder is kept between runs, so that only changes are compiled.
    build = BUILD / "installed" / "headers_build"
    # Without debug information, which takes longer to write than the code takes.
    flags = ("-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS_DEBUG=-O0")
    build_project(SOURCE, build, prefix, f"-DHEADERS={';'.join(headers)}", *flags)
    result = run_process([build / "program"])
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{RELEASE} 3 12\n"


def test_installed_tree_is_relocatable(prefix: Path) -> None:
    libraries = sorted(path.name for path in (prefix / "lib").glob("*.so"))
    built = sorted(path.name for path in (Path(weft.__file__).parent / "lib").glob("*.so"))
    assert libraries == built and "libweft_ops.so" in libraries
    for path in (*prefix.rglob("*.cmake"), *prefix.rglob("*.h")):
        assert str(TORCH) not in path.read_text() and str(BUILD) not in path.read_text(), path
    for name in libraries:
        dynamic = run_process(["readelf", "-d", prefix / "lib" / name])
        assert "[libtorch_cpu.so]" in dynamic.stdout and "PATH" not in dynamic.stdout, dynamic.stdout


def test_torch_is_found_without_python(prefix: Path, tmp_path: Path) -> None:
    no_python = "-DPython_EXECUTABLE=/nowhere"
    result = configure(SOURCE, tmp_path / "by_name", prefix, no_python, f"-DWEFT_TORCH_DIR={TORCH}")
    assert result.returncode == 0, result.stderr
    # As in site-packages: the prefix is the folder of the package `weft`, and torch's folder is its sibling.
    (tmp_path / "torch").symlink_to(TORCH)
    sibling = install(tmp_path / "weft")
    result = configure(SOURCE, tmp_path / "sibling", sibling, no_python)
    assert result.returncode == 0, result.stderr


def _torch_of_release(folder: Path, release: str) -> Path:
    for name in ("include", "lib"):
        (folder / name).symlink_to(TORCH / name)
    (folder / "version.py").write_text(f"__version__ = '{release}+cpu'\n")
    return folder


def test_mismatched_torch_fails(prefix: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    cases = {
        "finds no include/torch/headeronly/version.h": f"-DWEFT_TORCH_DIR={tmp_path}",
        "which has none: run `pip install torch` there first": "-DPython_EXECUTABLE=/nowhere",
        f"was built for torch {RELEASE} and finds 2.99.0": f"-DWEFT_TORCH_DIR={_torch_of_release(other, '2.99.0')}",
    }
    for number, (text, option) in enumerate(cases.items()):
        result = configure(SOURCE, tmp_path / str(number), prefix, option)
        assert result.returncode != 0
        assert text in " ".join(result.stderr.split()), result.stderr
