"""The build: CUDA sources only with nvcc, strategy/ without torch, and a clear error if torch is missing."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def _configure(build: Path, *options: str, env: dict[str, str] | None = None) -> str:
    cmake = str(Path(sys.executable).with_name("cmake"))
    folders = {"WEFT_PACKAGE_DIR": build / "weft", "WEFT_STRATEGY_PACKAGE_DIR": build / "weft" / "strategy"}
    defined = [f"-D{name}={value}" for name, value in {"Python_EXECUTABLE": sys.executable, **folders}.items()]
    command = [cmake, "--preset", "release", "-B", str(build), *defined, *options]
    environment = {**os.environ, **(env or {})}
    # Use the environment's cmake and ninja: the system's may be too old for the presets.
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300, env=environment)
    return run.stdout + run.stderr if run.returncode == 0 else f"failed: {run.stdout}{run.stderr}"


def _without_nvcc() -> dict[str, str]:
    folders = os.environ["PATH"].split(os.pathsep)
    kept = [folder for folder in folders if not Path(folder, "nvcc").exists()]
    return {"PATH": os.pathsep.join(kept), "CUDA_HOME": "", "CUDA_PATH": ""}


def test_cuda_sources_are_left_out_without_nvcc(tmp_path: Path) -> None:
    output = _configure(tmp_path, env=_without_nvcc())
    assert "weft: CUDA sources left out (nvcc: WEFT_NVCC-NOTFOUND" in output
    compiled = (tmp_path / "compile_commands.json").read_text()
    assert ".cu" not in compiled and "ops/src/column_row_mlp.cpp" in compiled


def test_cuda_on_without_nvcc_fails(tmp_path: Path) -> None:
    output = _configure(tmp_path, "-DWEFT_CUDA=ON", env=_without_nvcc())
    assert output.startswith("failed") and "WEFT_CUDA=ON needs nvcc and a CUDA build of torch" in output


def _load_module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _with_nvcc_release(folder: Path, release: str) -> dict[str, str]:
    """Return an environment whose nvcc prints that release."""
    nvcc = folder / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'\n")
    nvcc.chmod(0o755)
    return {"PATH": f"{nvcc.parent}{os.pathsep}{os.environ['PATH']}", "CUDA_HOME": "", "CUDA_PATH": ""}


def test_nvcc_of_another_major_release_is_not_used(tmp_path: Path) -> None:
    env = _with_nvcc_release(tmp_path, "10.2")
    text = "nvcc 10.2 and torch for CUDA"
    output = " ".join(_configure(tmp_path / "auto", env=env).split())
    if torch.version.cuda is None:
        pytest.skip("torch without CUDA: nvcc is not used")
    assert not output.startswith("failed") and "CUDA sources left out, because " + text in output
    assert ".cu" not in (tmp_path / "auto" / "compile_commands.json").read_text()
    output = " ".join(_configure(tmp_path / "on", "-DWEFT_CUDA=ON", env=env).split())
    assert output.startswith("failed") and "WEFT_CUDA=ON: " + text in output


@pytest.mark.parametrize("text", ["9.x", "sm_90"])
def test_invalid_architecture_list_fails(tmp_path: Path, text: str) -> None:
    output = _configure(tmp_path, env={"TORCH_CUDA_ARCH_LIST": text})
    if "CUDA sources left out" in output:
        pytest.skip("no nvcc, or a torch without CUDA: the list is not read")
    assert output.startswith("failed") and f"TORCH_CUDA_ARCH_LIST has '{text}'" in " ".join(output.split())


# NOTE: tmp_path contains the test's name, which must not contain "torch".
def test_lower_layers_configure_alone(tmp_path: Path) -> None:
    output = _configure(tmp_path, "-DWEFT_WITHOUT_TORCH=ON")
    assert not output.startswith("failed"), output
    assert "torch" not in (tmp_path / "compile_commands.json").read_text()


def test_build_without_torch_fails_with_remedy(tmp_path: Path) -> None:
    import setuptools

    packages = Path(setuptools.__file__).parents[1]
    for name in ("setuptools", "_distutils_hack"):
        (tmp_path / name).symlink_to(packages / name)
    code = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT / 'cmake')!r}]\n"
        "import build_backend; build_backend.get_requires_for_build_wheel()"
    )
    start = time.monotonic()
    run = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert run.returncode == 1
    assert run.stderr.strip().endswith("`pip install --no-build-isolation .`")
    assert "this build sees none" in run.stderr
    # Generous for a loaded machine; a compile or a download would take far longer.
    assert time.monotonic() - start < 30


def test_missing_googletest_fails_with_remedy(tmp_path: Path) -> None:
    """Runs offline: no process listens at the proxies' address."""
    offline = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    options = ["-DWEFT_WITHOUT_TORCH=ON", "-DWEFT_BUILD_TESTS=ON", "-DCMAKE_DISABLE_FIND_PACKAGE_GTest=ON"]
    output = " ".join(_configure(tmp_path, *options, env=offline).split())
    assert output.startswith("failed") and "The C++ tests need GoogleTest 1.12 or newer" in output
    assert "install GoogleTest (Debian: libgtest-dev), or configure with -DWEFT_BUILD_TESTS=OFF." in output


def _interpreter(folder: Path, seconds: float | None) -> str:
    """Return the path of a `python3` that prints itself and the seconds, or fails."""
    folder.mkdir()
    file = folder / "python3"
    file.write_text("#!/bin/sh\nexit 1\n" if seconds is None else f"#!/bin/sh\necho $0 {seconds}\n")
    file.chmod(0o755)
    return str(file)


def test_environment_is_of_the_fastest_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fastest_python = _load_module(ROOT / "cmake" / "fastest_python.py")
    old, first, similar, fast = (
        _interpreter(tmp_path / name, seconds)
        for name, seconds in (("old", None), ("first", 1.0), ("similar", 0.95), ("fast", 0.7))
    )
    in_environment = _interpreter(tmp_path / "venv", 0.1)
    (tmp_path / "pyvenv.cfg").touch()
    assert fastest_python.seconds_of([old, first, similar, fast]) == {first: 1.0, similar: 0.95, fast: 0.7}
    assert fastest_python.choose({first: 1.0, similar: 0.95}) == first
    assert fastest_python.choose({first: 1.0, similar: 0.95, fast: 0.7}) == fast
    monkeypatch.setenv("PATH", str(Path(in_environment).parent))
    assert fastest_python.candidates() == []
    (tmp_path / "pyvenv.cfg").unlink()
    monkeypatch.setenv("PATH", os.pathsep.join(str(Path(path).parent) for path in (fast, first)))
    assert fastest_python.candidates() == [fast, first]


def test_interpreters_run_in_turn(tmp_path: Path) -> None:
    """An interpreter that other work slows down in one round is not taken for a slow one."""
    fastest_python = _load_module(ROOT / "cmake" / "fastest_python.py")
    steady, slowed = _interpreter(tmp_path / "steady", 1.0), tmp_path / "slowed"
    slowed.mkdir()
    script = slowed / "python3"
    script.write_text(f"#!/bin/sh\n[ -f {slowed}/again ] && echo $0 0.7 || echo $0 1.1\ntouch {slowed}/again\n")
    script.chmod(0o755)
    assert fastest_python.seconds_of([steady, str(script)]) == {steady: 1.0, str(script): 0.7}


def test_interpreter_that_runs_the_tests_can_create_an_environment() -> None:
    fastest_python = _load_module(ROOT / "cmake" / "fastest_python.py")
    base = Path(sys.base_prefix) / "bin" / "python3"
    [seconds] = fastest_python.seconds_of([str(base)]).values()
    assert 0 < seconds < 60
