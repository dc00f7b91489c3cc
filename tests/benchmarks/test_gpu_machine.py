"""`make gpu` says what the machine lacks, configures without a network, and its package folder is importable."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks.gpu_package import BENCHMARKS, ROOT, build, machine


def environment_with(folder: Path, *, torch_module: str | None = None, nvcc: str | None = None) -> dict[str, str]:
    """Return an environment with a torch module of this text, and with an nvcc that prints this release."""
    environment = {**os.environ, "CUDA_HOME": str(folder / "no-cuda"), "CUDA_PATH": ""}
    paths = [environment["PATH"]]
    if torch_module is not None:
        (folder / "torch.py").write_text(torch_module)
        environment["PYTHONPATH"] = str(folder)
    if nvcc is not None:
        paths.insert(0, str(folder / "bin"))
        command = folder / "bin" / "nvcc"
        command.parent.mkdir()
        command.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {nvcc}, V{nvcc}.1'\n")
        command.chmod(0o755)
    environment["PATH"] = os.pathsep.join(paths)
    return environment


def fake_torch(version: str, cuda: str | None, available: bool) -> str:
    return f"""
from types import SimpleNamespace as _Namespace
__version__ = {version!r}
version = _Namespace(cuda={cuda!r})
cuda = _Namespace(
    is_available=lambda: {available},
    get_device_properties=lambda i: _Namespace(name="H100", total_memory=85899345920, multi_processor_count=132),
    get_device_capability=lambda i: (9, 0),
    device_count=lambda: 1,
)
"""


@pytest.mark.parametrize(
    ("torch_module", "requirement", "sentence"),
    [
        ("import nothing_of_this_name", "torch", "cannot import torch (ModuleNotFoundError: No module named"),
        (fake_torch("2.10.1", "13.0", True), "torch", "got torch 2.10.1; torch 2.11 or newer with CUDA is needed"),
        (fake_torch("2.11.0", None, False), "torch", "torch 2.11.0 is built without CUDA"),
        (fake_torch("2.11.0+cu130", "13.0", False), "gpu", "torch 2.11.0+cu130 for CUDA 13.0 finds no usable GPU"),
    ],
)
def test_unusable_torch_is_reported(tmp_path: Path, torch_module: str, requirement: str, sentence: str) -> None:
    found = machine.examine(environment_with(tmp_path, torch_module=torch_module, nvcc="13.0"))
    assert sentence in found.missing[requirement]
    assert "nvcc" not in found.missing


def test_usable_torch_with_a_gpu_lacks_nothing(tmp_path: Path) -> None:
    environment = environment_with(tmp_path, torch_module=fake_torch("2.11.0+cu130", "13.0", True), nvcc="13.2")
    found = machine.examine(environment)
    assert not {"torch", "gpu", "nvcc"} & set(found.missing)
    assert found.facts["capability"] == [9, 0] and found.facts["nvcc"] == "13.2" and found.facts["gpu"] == "H100"


def test_nvcc_of_another_major_release_is_reported(tmp_path: Path) -> None:
    environment = environment_with(tmp_path, torch_module=fake_torch("2.11.0+cu130", "13.0", True), nvcc="12.9")
    sentence = machine.examine(environment).missing["nvcc"]
    assert sentence.startswith("got nvcc 12.9 and torch for CUDA 13.0; both must have the same major release")


def test_missing_tools_and_modules_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "MODULES", {"nothing_of_this_name": "nothing-of-this-name"})
    monkeypatch.setattr(machine, "tool", lambda name, environment: None)
    monkeypatch.setattr(machine, "cuda_tool", lambda name, environment: None)
    found = machine.examine(environment_with(tmp_path, torch_module=fake_torch("2.11.0", "13.0", True)))
    expected = {"nothing_of_this_name", "cmake", "ninja", "compiler", "nvcc", "compute-sanitizer"}
    assert expected <= set(found.missing)
    assert all(": " in sentence and sentence.endswith(".") for sentence in found.missing.values())


def test_old_cmake_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = tmp_path / "cmake"
    old.write_text("#!/bin/sh\necho 'cmake version 3.22.1'\n")
    old.chmod(0o755)
    monkeypatch.setattr(machine, "tool", lambda name, environment: str(old))
    found = machine.examine({**os.environ, "CUDA_VISIBLE_DEVICES": ""}, device="cpu")
    assert found.missing["cmake"] == "got cmake 3.22.1; cmake 3.28 or newer is needed: install it."


def test_gpu_is_not_needed_on_the_cpu() -> None:
    found = machine.examine(dict(os.environ), device="cpu")
    assert not {"torch", "gpu", "nvcc", "compute-sanitizer", "pytest", "pybind11"} & set(found.missing)
    assert found.facts["torch"] == torch.__version__


def without_network(command: list[str]) -> list[str]:
    """Return the command in a network namespace without interfaces, where that is allowed."""
    unshare = shutil.which("unshare")
    if unshare is not None:
        enter = [unshare, "--map-root-user", "--net", "--"]
        if subprocess.run([*enter, "true"], check=False, capture_output=True).returncode == 0:
            return [*enter, *command]
    return command


NOWHERE = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")


def test_build_configures_offline(tmp_path: Path) -> None:
    """Configures as `make gpu` would for an H100: sm_90 only, no tests, nothing in the source tree."""
    nvcc = machine.cuda_tool("nvcc", os.environ)
    cuda = nvcc is not None and torch.version.cuda is not None
    environment = build.build_environment("9.0" if cuda else None, {**os.environ, **NOWHERE})
    build.lay_out_packages(build.site_of(tmp_path))
    command = build.configure_command(tmp_path, cuda, environment)
    run = subprocess.run(
        without_network(command), cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert run.returncode == 0, run.stdout + run.stderr
    compiled = json.loads((tmp_path / "cmake" / "compile_commands.json").read_text())
    assert not any("/tests/" in each["file"] for each in compiled)
    kernels = [each["command"] for each in compiled if each["file"].endswith(".cu")]
    assert bool(kernels) == cuda
    for each in kernels:
        assert "arch=compute_90,code=[sm_90]" in each and "sm_80" not in each and "code=[compute_" not in each
    packages = build.site_of(tmp_path) / "weft"
    assert json.loads((packages / "lib" / "build.json").read_text())["cuda_sources"] == cuda
    assert (packages / "__init__.py").resolve() == ROOT / "ops" / "python" / "__init__.py"
    assert (packages / "strategy" / "apply.py").is_file() and (packages / "lightning" / "__init__.py").is_file()
    assert not build.has_package(tmp_path)


def test_package_folder_is_importable(tmp_path: Path) -> None:
    """Combines the Python files of the folder with the libraries of this environment's build."""
    site = build.site_of(tmp_path)
    build.lay_out_packages(site)
    for target, source in (("weft", "ops/python"), ("weft/strategy", "strategy/python")):
        for library in (ROOT / source).glob("*.so"):
            (site / target / library.name).symlink_to(library)
    (site / "weft" / "lib").symlink_to(ROOT / "ops" / "python" / "lib")
    assert build.has_package(tmp_path), "run make build first"
    code = (
        "import weft, weft.lightning, weft.strategy.apply, weft_command; print(weft.__file__, weft.strategy.__file__); "
        "import torch; print(torch.ops.weft.rms_norm)"
    )
    environment = {**os.environ, "PYTHONPATH": str(site)}
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split()[:2] == [str(site / "weft" / "__init__.py"), str(site / "weft/strategy/__init__.py")]
    # The parts of a run find the package there.
    command = [sys.executable, str(BENCHMARKS / "gpu"), "--work", str(tmp_path), "--out", str(tmp_path / "out")]
    command += ["--device", "cpu", "--short", "--parts", "smoke"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=200)
    assert run.returncode == 0, run.stdout + run.stderr


def test_make_uses_the_python_of_the_caller(tmp_path: Path) -> None:
    """Not the Python of .venv, which other targets put first on PATH."""
    fake = tmp_path / "python3"
    fake.write_text('#!/bin/sh\necho "fake $@"\n')
    fake.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    run = subprocess.run(
        ["make", "gpu"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert run.returncode == 0 and "fake benchmarks/gpu" in run.stdout, run.stdout + run.stderr
    assert (BENCHMARKS / "gpu" / "__main__.py").is_file()
