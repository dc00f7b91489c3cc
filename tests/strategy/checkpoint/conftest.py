"""Fixtures of the tests of damaged and hostile checkpoints."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from strategy.checkpoint.saved import save_to


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that tests do not change."""
    folder = tmp_path_factory.mktemp("original")
    save_to(folder)
    return folder


@pytest.fixture
def copy(original: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint."""
    return Path(shutil.copytree(original, tmp_path / "copy"))


@pytest.fixture
def bomb(tmp_path: Path) -> Iterator[object]:
    """An object whose pickle makes a folder when it is loaded; after the test, there must be none."""
    evidence = tmp_path / "evidence"

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(evidence),)

    yield Bomb()
    assert not evidence.exists()
