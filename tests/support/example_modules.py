"""Loads the modules of `examples/` for unit tests."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

EXAMPLES = Path(__file__).parents[2] / "examples"


def load_example(name: str) -> ModuleType:
    """Return the module `examples/<name>.py`, under a unique module name: `model` and `text` are too common."""
    full_name = f"weft_examples_{name}"
    if full_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(full_name, EXAMPLES / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[full_name] = module
        spec.loader.exec_module(module)
    return sys.modules[full_name]
