"""Checks that an installed wheel is complete, is imported from site-packages, and can train.

`make compat` runs this file by name in an environment where weft is installed from a wheel. `make test` has an editable
install, where these tests fail; the file's name keeps pytest from collecting it there.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import json
import sysconfig
from pathlib import Path

import pytest
import torch
from torch import nn

import weft
from support.packages import ROOT, package_files
from support.processes import run_script

SITE_PACKAGES = Path(sysconfig.get_path("platlib")).resolve()
SCRIPT = Path(__file__).with_name("train_two_steps.py")
# CMake installs these files.
BUILT = ["lib/build.json", "lib/libweft_ops.so", "lib/cmake/weft/weftConfig.cmake", "lib/cmake/weft/WeftTorch.cmake"]
MODULES = ["_collectives", "_memory", "_overlap", "_weight_sink", "strategy/_plan"]
HEADERS = ["ops/include", "ops/collectives/include", "ops/memory/include"]


def _distribution() -> importlib.metadata.Distribution:
    """Return the distribution in site-packages: the checkout, which is on the path, may have a weft.egg-info, too."""
    [distribution] = importlib.metadata.distributions(name="weft", path=[str(SITE_PACKAGES)])
    return distribution


def _installed() -> set[str]:
    return {str(file) for file in _distribution().files or ()}


def test_weft_is_imported_from_the_wheel() -> None:
    assert Path(weft.__file__).resolve() == SITE_PACKAGES / "weft" / "__init__.py"
    origin = json.loads(_distribution().read_text("direct_url.json") or "{}")
    assert "archive_info" in origin and origin["url"].endswith(".whl"), origin
    assert not [name for name in _installed() if "__editable__" in name]


def test_wheel_contains_every_python_file_and_stub() -> None:
    files = package_files()
    assert sorted(set(files) - _installed()) == []
    for name, source in files.items():
        assert (SITE_PACKAGES / name).read_bytes() == source.read_bytes(), name


def test_wheel_contains_libraries_and_headers() -> None:
    modules = [f"{name}{importlib.machinery.EXTENSION_SUFFIXES[0]}" for name in MODULES]
    headers = [
        f"include/{path.relative_to(ROOT / folder).as_posix()}"
        for folder in HEADERS
        for path in (ROOT / folder).rglob("*.h")
    ]
    assert "include/weft/ops/operators.h" in headers
    expected = {f"weft/{name}" for name in [*BUILT, *modules, *headers]}
    assert sorted(expected - _installed()) == []


def test_two_ranks_train_with_the_wheel(tmp_path: Path) -> None:
    result = run_script(SCRIPT, timeout=120, cwd=tmp_path, env={"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"})
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    lines = [line.removeprefix("RESULT ") for line in result.stdout.splitlines() if line.startswith("RESULT ")]
    ranks = sorted(map(json.loads, lines), key=lambda rank: rank["rank"])
    assert [rank["rank"] for rank in ranks] == [0, 1]
    for rank in ranks:
        assert rank["steps"] == 2
        assert rank["local_shape"] == [6, 8]
        assert rank["losses"] == pytest.approx(_unsharded_losses(), rel=1e-10)
        assert Path(rank["weft"]).resolve() == SITE_PACKAGES / "weft" / "__init__.py"
        assert Path(rank["plugin"]).resolve() == SITE_PACKAGES / "weft" / "lightning" / "__init__.py"


def _unsharded_losses() -> list[float]:
    """Return the losses of the script's model on one process, computed with torch only."""
    torch.manual_seed(1)
    layers = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)).double()
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.5)
    losses = []
    for batch in torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).split(4):
        loss = (layers(batch) - batch).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses
