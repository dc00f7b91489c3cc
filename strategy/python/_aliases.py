"""Makes a module of a sub-package importable under a second, shorter path; the module is loaded at its first import."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class Aliases(MetaPathFinder, Loader):
    """Finds modules of `package` under aliases; `modules`: alias -> real module path, both relative to the package."""

    def __init__(self, package: str, modules: Mapping[str, str]) -> None:
        self._modules = {f"{package}.{alias}": f"{package}.{module}" for alias, module in modules.items()}

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in self._modules else None

    def exec_module(self, module: ModuleType) -> None:
        # The import system returns the entry of sys.modules afterwards: both paths give one module object.
        sys.modules[module.__name__] = importlib.import_module(self._modules[module.__name__])
