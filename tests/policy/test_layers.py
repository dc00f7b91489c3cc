"""Checks on the sources that a layer uses only layers above it in the table of docs/architecture.md."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# folder -> what its Python files must not import
PYTHON_LAYERS = {
    "ops/python": ("weft.strategy", "weft._plugin", "weft.lightning", "lightning", "pytorch_lightning"),
    "strategy/python": ("weft._plugin", "weft.lightning", "weft.pytorch_lightning", "lightning", "pytorch_lightning"),
    "strategy/command": ("weft._plugin", "weft.lightning", "weft.pytorch_lightning", "lightning", "pytorch_lightning"),
    "lightning_plugin/core": ("lightning", "pytorch_lightning", "lightning_fabric"),
}

# folder -> pattern of headers that its C++ files must not include
CPP_LAYERS = {
    "kernels": r"c10d|torch/|ATen/core/dispatch|weft/(ops|strategy)|pybind11|Python\.h",
    "ops/collectives/core": r"ATen|c10|torch|pybind11|Python\.h|weft/(ops|strategy)",
    "ops/memory/core": r"ATen|c10|torch|pybind11|Python\.h|weft/(ops|strategy)",
    "ops/src": r"weft/strategy|pybind11|Python\.h|ProcessGroup(Gloo|NCCL)",
    "ops/include": r"weft/(kernels|strategy)|c10d|pybind11",
    "strategy/src": r"ATen|c10|torch|pybind11|weft/(ops|kernels)",
    "strategy/include": r"ATen|c10|torch|pybind11|weft/(ops|kernels)",
}


def _imports(tree: ast.AST) -> Iterator[str]:
    """Yield the modules imported at run time, without those under `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        yield from _imports(node)


@pytest.mark.parametrize("folder", PYTHON_LAYERS)
def test_python_files_import_only_layers_above(folder: str) -> None:
    files = list((ROOT / folder).rglob("*.py"))
    assert files
    for file in files:
        for module in _imports(ast.parse(file.read_text())):
            for forbidden in PYTHON_LAYERS[folder]:
                assert module != forbidden and not module.startswith(forbidden + "."), f"{file}: {module}"


def test_packages_of_strategy_import_in_one_direction() -> None:
    """Checks the graph of sub-packages and top-level modules; `__init__.py` loads public names at first use."""
    root = ROOT / "strategy/python"
    graph: dict[str, set[str]] = {}
    for file in root.rglob("*.py"):
        if file != root / "__init__.py":
            package = file.relative_to(root).with_suffix("").parts[0]
            modules = [module.split(".") for module in _imports(ast.parse(file.read_text()))]
            imported = {parts[2] for parts in modules if parts[:2] == ["weft", "strategy"] and len(parts) > 2}
            graph.setdefault(package, set()).update(imported - {package})
    assert "apply" in graph["estimate"]
    assert set().union(*graph.values()) <= {*graph, "_plan"}, "import public names from their modules"
    TopologicalSorter(graph).prepare()  # raises CycleError


def test_parts_of_plugin_use_public_members_of_each_other() -> None:
    """Checks that only a class itself uses its underscored members, except those that Lightning's strategies define."""
    of_lightning = set(re.findall(r"`(_\w+)`", (ROOT / "lightning_plugin/core/engine.py").read_text().split('"""')[1]))
    assert "_device_mesh" in of_lightning
    for file in sorted((ROOT / "lightning_plugin/core").glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and re.fullmatch("_[a-z]\\w*", node.attr):
                owner = ast.unparse(node.value)
                names_a_part = re.search(r"(^|_|\.)(engine|strategy|stages|steps|loaders)$", owner) is not None
                assert not names_a_part or node.attr in of_lightning, f"{file}: {owner}.{node.attr}"


@pytest.mark.parametrize("folder", CPP_LAYERS)
def test_cpp_files_include_only_layers_above(folder: str) -> None:
    files = [path for path in (ROOT / folder).rglob("*") if path.suffix in {".h", ".cpp", ".cu", ".cuh"}]
    assert files
    for file in files:
        for header in re.findall(r'^#include [<"]([^>"]+)[>"]', file.read_text(), re.MULTILINE):
            assert not re.match(CPP_LAYERS[folder], header), f"{file} includes {header}"


def test_strategy_does_not_import_lightning() -> None:
    code = """if True:
        import sys, weft.strategy
        for name in weft.strategy.__all__:  # each is loaded at its first use
            getattr(weft.strategy, name)
        assert "weft.strategy.apply" in sys.modules
        sys.exit(any("lightning" in name.split(".")[0] for name in sys.modules))"""
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0


def test_repository_folders_are_not_packages() -> None:
    """In the root folder, `import ops` must not load modules of weft a second time, under another name."""
    for folder in ("ops", "strategy", "lightning_plugin", "kernels", "examples", "benchmarks"):
        assert not (ROOT / folder / "__init__.py").exists(), folder
