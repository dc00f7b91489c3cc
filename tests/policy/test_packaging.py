"""The contents of an sdist and a wheel: every source that git tracks, every package folder, every typed stub."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from fnmatch import fnmatch
from pathlib import Path

import pytest

import weft
from support.packages import ROOT, SETUPTOOLS, package_files, package_folders

SOURCES = ["kernels", "ops", "strategy", "lightning_plugin", "cmake", "CMakeLists.txt", "CMakePresets.json"]
METADATA = ["setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE", "README.md"]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an unpacked sdist, built by the backend as a frontend calls it."""
    folder = tmp_path_factory.mktemp("sdist")
    checkout = folder / "checkout"
    checkout.mkdir()
    # Build a copy: setuptools writes next to setup.py, where concurrent tests list the files.
    for entry in ROOT.iterdir():
        if entry.is_file():
            shutil.copy2(entry, checkout)
        elif not entry.name.startswith(".") and entry.suffix != ".egg-info":
            (checkout / entry.name).symlink_to(entry)
    # A stale file list from an earlier build: the file exists, but must not be in an sdist.
    (checkout / "weft.egg-info").mkdir()
    (checkout / "weft.egg-info" / "SOURCES.txt").write_text("benchmarks/README.md\n")
    code = f"import sys; sys.path.insert(0, 'cmake'); import build_backend; build_backend.build_sdist({str(folder)!r})"
    _run([sys.executable, "-c", code], checkout)
    [archive] = folder.glob("weft-*.tar.gz")
    _run(["tar", "-xzf", archive.name], folder)
    return folder / archive.name.removesuffix(".tar.gz")


def _run(command: list[str], folder: Path) -> None:
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr


def test_sdist_contains_tracked_sources(sdist: Path) -> None:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *SOURCES, *METADATA]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("no git checkout: the list of source files is git's")
    tracked = {name for name in listed.stdout.splitlines() if (ROOT / name).is_file()}
    packed = {path.relative_to(sdist).as_posix() for path in sdist.rglob("*") if path.is_file()}
    generated = {name for name in packed if name in {"PKG-INFO", "setup.cfg"} or name.startswith("weft.egg-info/")}
    assert sorted(tracked - packed) == [], "MANIFEST.in leaves these files out"
    assert sorted(packed - tracked - generated) == [], "MANIFEST.in includes these files, which git does not track"
    for name in tracked:
        assert (sdist / name).read_bytes() == (ROOT / name).read_bytes(), name


def test_sdist_configures_without_tests(sdist: Path, tmp_path: Path) -> None:
    """Uses the preset of an editable install, which builds the tests if they exist."""
    assert not (sdist / "tests").exists()
    cmake, ninja = (str(Path(sys.executable).with_name(name)) for name in ("cmake", "ninja"))
    tools = [f"-DPython_EXECUTABLE={sys.executable}", f"-DCMAKE_MAKE_PROGRAM={ninja}", "-DWEFT_WITHOUT_TORCH=ON"]
    _run([cmake, "--preset", "dev", "-B", str(tmp_path), *tools], sdist)
    assert "WEFT_BUILD_TESTS:BOOL=OFF" in (tmp_path / "CMakeCache.txt").read_text()


def _metadata_of_wheel(sdist: Path, folder: Path, torch_release: str) -> Path:
    """Return the .dist-info folder that a build makes if this release of torch is installed."""
    folder.mkdir()
    found = f"import importlib.metadata as m; m.version = lambda name: {torch_release + '+cpu'!r}"
    build = "import sys; sys.path.insert(0, 'cmake'); import build_backend"
    _run(
        [sys.executable, "-c", f"{build}; {found}; build_backend.prepare_metadata_for_build_wheel({str(folder)!r})"],
        sdist,
    )
    [metadata] = folder.glob("*.dist-info")
    return metadata


def _wheel_without_files(metadata: Path, folder: Path) -> None:
    name = metadata.name.removesuffix(".dist-info")
    with zipfile.ZipFile(folder / f"{name}-py3-none-any.whl", "w") as wheel:
        wheel.write(metadata / "METADATA", f"{metadata.name}/METADATA")
        wheel.writestr(f"{metadata.name}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{metadata.name}/RECORD", "")


@pytest.mark.parametrize("installed", ["2.11.0", "2.15.0"])
def test_an_installer_chooses_the_wheel_for_the_installed_torch(sdist: Path, tmp_path: Path, installed: str) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for release in ("2.11.0", "2.12.1", "2.15.0"):
        metadata = _metadata_of_wheel(sdist, tmp_path / release, release)
        text = (metadata / "METADATA").read_text()
        assert f"Version: {weft.__version__}+torch{release}\n" in text and f"Requires-Dist: torch=={release}\n" in text
        _wheel_without_files(metadata, wheels)
    uv = str(Path(sys.executable).with_name("uv"))
    (tmp_path / "in").write_text("weft\n")
    # uv uses no index: torch and the other dependencies are wheels without files, too.
    for name, version in {"torch": installed, "numpy": "2.0.0", "pyyaml": "6.0.0", "xxhash": "3.5.0"}.items():
        package = tmp_path / f"{name}-{version}.dist-info"
        package.mkdir()
        (package / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        _wheel_without_files(package, wheels)
    command = [uv, "pip", "compile", "--quiet", "--no-index", "--find-links", str(wheels), "--no-header", "in"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert f"weft=={weft.__version__}+torch{installed}\n" in run.stdout, run.stdout + run.stderr


def test_every_package_folder_is_listed() -> None:
    folders = package_folders()
    assert {"weft", "weft.nn", "weft.strategy", "weft._plugin", "weft.lightning"} <= set(folders)
    assert sorted(SETUPTOOLS["packages"]) == sorted(folders), "pyproject.toml: [tool.setuptools] packages"
    assert SETUPTOOLS["package-dir"] == folders, "pyproject.toml: [tool.setuptools.package-dir]"
    for folder in folders.values():
        assert (ROOT / folder / "__init__.py").is_file(), f"{folder} needs an __init__.py to be a package"


def test_every_typed_stub_is_package_data() -> None:
    patterns = SETUPTOOLS["package-data"]
    stubs = [name for name, path in package_files().items() if path.suffix != ".py"]
    assert {"weft/py.typed", "weft/_collectives.pyi", "weft/strategy/_plan.pyi"} <= set(stubs)
    for stub in stubs:
        package, _, name = stub.rpartition("/")
        patterns_of_package = [*patterns.get("*", []), *patterns.get(package.replace("/", "."), [])]
        assert any(fnmatch(name, pattern) for pattern in patterns_of_package), (
            f"pyproject.toml's package-data leaves out {stub}"
        )
