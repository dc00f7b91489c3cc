"""In-tree PEP 517 backend: setuptools, after one check that torch is there to build against.

weft is compiled against the torch that is installed, so torch is not a build requirement: an isolated
build would fetch a second torch and produce a library for the wrong one.
"""

from __future__ import annotations

import importlib.util
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


def get_requires_for_build_wheel(config_settings=None):
    _require_torch()
    return build_meta.get_requires_for_build_wheel(config_settings)


def get_requires_for_build_editable(config_settings=None):
    _require_torch()
    return build_meta.get_requires_for_build_editable(config_settings)


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    _require_torch()
    return build_meta.prepare_metadata_for_build_wheel(metadata_directory, config_settings)


def prepare_metadata_for_build_editable(metadata_directory, config_settings=None):
    _require_torch()
    return build_meta.prepare_metadata_for_build_editable(metadata_directory, config_settings)


def build_sdist(sdist_directory, config_settings=None):
    # setuptools adds the files of an earlier list that still exist: MANIFEST.in alone decides.
    Path("weft.egg-info", "SOURCES.txt").unlink(missing_ok=True)
    return build_meta.build_sdist(sdist_directory, config_settings)


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    _require_torch()
    return build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    _require_torch()
    return build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
