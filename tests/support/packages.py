"""The Python packages of weft that pyproject.toml lists, and their source folders and files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
SETUPTOOLS: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
# The folders whose subfolders are packages; everything else in kernels/, ops/ and strategy/ is C++.
BASES = {"weft": "ops/python", "weft.strategy": "strategy/python", "weft_command": "strategy/command"}
PLUGINS = "lightning_plugin"
PLUGIN_NAMES = {"core": "_plugin"}  # packages whose name differs from their folder's


def package_folders() -> dict[str, str]:
    """Return {package name: folder relative to ROOT} for each folder that holds Python sources of weft."""
    bases = dict(BASES)
    for folder in (ROOT / PLUGINS).iterdir():
        if folder.is_dir():
            bases[f"weft.{PLUGIN_NAMES.get(folder.name, folder.name)}"] = f"{PLUGINS}/{folder.name}"
    folders = {}
    for name, base in bases.items():
        for folder in {path.parent for path in (ROOT / base).rglob("*.py")}:
            parts = folder.relative_to(ROOT / base).parts
            folders[".".join((name, *parts))] = folder.relative_to(ROOT).as_posix()
    return folders


def package_files() -> dict[str, Path]:
    """Return {path in site-packages: source} for each file of `package_folders()` that an installed weft must have."""
    return {
        f"{name.replace('.', '/')}/{path.name}": path
        for name, folder in package_folders().items()
        for path in (ROOT / folder).iterdir()
        if path.suffix in {".py", ".pyi"} or path.name == "py.typed"
    }
