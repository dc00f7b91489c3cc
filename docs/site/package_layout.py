"""Lays the Python packages out as in site-packages, in build/site-packages, with symbolic links to the sources.

The repository's folders are not named like the packages, which mypy and mkdocstrings need. `make lint` runs this file;
`hooks.py` imports it.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build/site-packages"
_PATTERNS = ("*.py", "*.pyi", "py.typed")


def lay_out_packages(folder: Path = FOLDER) -> None:
    """Delete `folder`, and create it with links to the sources of all packages."""
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
    shutil.rmtree(folder, ignore_errors=True)
    for name, source in packages.items():
        package = folder.joinpath(*name.split("."))
        package.mkdir(parents=True, exist_ok=True)
        for pattern in _PATTERNS:
            for path in (ROOT / source).glob(pattern):
                (package / path.name).symlink_to(path)


if __name__ == "__main__":
    lay_out_packages()
