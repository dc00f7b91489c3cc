"""Packaging of weft: a build_ext that runs CMake, and the torch release that a wheel is built for.

The version is that of `weft.__version__`; all other metadata is in pyproject.toml.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


class CMakeBuild(build_ext):
    """Configure and build the CMake project into the package folders (in place for editable installs).

    Environment: WEFT_PRESET, the preset of CMakePresets.json (default: dev if editable, release for a wheel);
    WEFT_BUILD_DIR, the build folder (default: build/PRESET if editable, setuptools' build folder for a wheel); CMAKE,
    the cmake command; MAX_JOBS, the number of parallel compilers.
    """

    def build_extension(self, ext: Extension) -> None:
        if self.editable_mode or self.inplace:
            package, preset = ROOT / "ops" / "python", os.environ.get("WEFT_PRESET", "dev")
            strategy = ROOT / "strategy" / "python"
            build_dir = Path(os.environ.get("WEFT_BUILD_DIR", ROOT / "build" / preset))
        else:
            package, preset = Path(self.build_lib).resolve() / "weft", os.environ.get("WEFT_PRESET", "release")
            strategy = package / "strategy"
            build_dir = Path(os.environ.get("WEFT_BUILD_DIR", self.build_temp)).resolve()
        cmake = os.environ.get("CMAKE", "cmake")
        subprocess.run(
            [
                cmake,
                "--preset",
                preset,
                "-B",
                str(build_dir),
                f"-DPython_EXECUTABLE={sys.executable}",
                f"-DWEFT_PACKAGE_DIR={package}",
                f"-DWEFT_STRATEGY_PACKAGE_DIR={strategy}",
                "-DCMAKE_INSTALL_LIBDIR=lib",  # where the libraries are built
            ],
            cwd=ROOT,
            check=True,
        )
        jobs = os.environ.get("MAX_JOBS", str(os.cpu_count() or 1))
        subprocess.run([cmake, "--build", str(build_dir), "--parallel", jobs], cwd=ROOT, check=True)
        if not (self.editable_mode or self.inplace):
            # The headers and the CMake package for C++ programs; the libraries are already in place.
            install = [cmake, "--install", str(build_dir), "--prefix", str(package), "--component", "development"]
            subprocess.run(install, cwd=ROOT, check=True)

    def get_outputs(self) -> list[str]:
        return []

    def copy_extensions_to_source(self) -> None:
        """Do nothing: CMake has written into the source folders."""


# The release of torch that a wheel is built against; cmake/build_backend.py sets it.
torch_release = os.environ.get("WEFT_WHEEL_TORCH")
version = re.search(r'^__version__ = "(.+)"$', (ROOT / "ops/python/__init__.py").read_text(), re.MULTILINE)[1]

setup(
    ext_modules=[Extension("weft._cmake", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
    version=f"{version}+torch{torch_release}" if torch_release else version,
    install_requires=[f"torch=={torch_release}" if torch_release else "torch>=2.11", "numpy", "pyyaml", "xxhash>=3.5"],
)
