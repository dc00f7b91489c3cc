"""In-tree PEP 517 backend: setuptools, plus the installed torch as a part of a wheel's identity.

weft is compiled against the installed torch, so torch is not a build requirement: an isolated build would fetch a
second torch and produce a library for the wrong one.

A wheel names its torch twice, so that an installer never combines the wheel with another torch: the local part of its
version (0.1.0+torch2.15.0) distinguishes wheels in one folder, and its requirement is exact (torch==2.15.0). An sdist
and an editable install name no release of torch, because each build uses the installed one.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403


def _require_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise SystemExit(
            "weft is built against the torch that is installed, and this build sees none: run "
            "`pip install 'torch>=2.11' 'cmake>=3.28' ninja pybind11 'setuptools>=77'`, then "
            "`pip install --no-build-isolation .`"
        )


@contextmanager
def _for_installed_torch() -> Iterator[None]:
    """Set WEFT_WHEEL_TORCH, so that setup.py writes the metadata of a wheel for the installed release of torch."""
    _require_torch()
    os.environ["WEFT_WHEEL_TORCH"] = importlib.metadata.version("torch").split("+", maxsplit=1)[0]
    try:
        yield
    finally:
        del os.environ["WEFT_WHEEL_TORCH"]


def get_requires_for_build_wheel(config_settings=None):
    _require_torch()
    return build_meta.get_requires_for_build_wheel(config_settings)


def get_requires_for_build_editable(config_settings=None):
    _require_torch()
    return build_meta.get_requires_for_build_editable(config_settings)


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    with _for_installed_torch():
        return build_meta.prepare_metadata_for_build_wheel(metadata_directory, config_settings)


def prepare_metadata_for_build_editable(metadata_directory, config_settings=None):
    _require_torch()
    return build_meta.prepare_metadata_for_build_editable(metadata_directory, config_settings)


def build_sdist(sdist_directory, config_settings=None):
    # setuptools adds files from an earlier list; without it, only MANIFEST.in decides.
    Path("weft.egg-info", "SOURCES.txt").unlink(missing_ok=True)
    return build_meta.build_sdist(sdist_directory, config_settings)


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    with _for_installed_torch():
        return build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    _require_torch()
    return build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
