"""The processes of dry runs are forks of a server that has imported what they need, which takes a new process 5 s."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator

import pytest

_PRELOADED = ["weft.lightning", "weft.strategy.dry_run.process"]


@pytest.fixture(scope="session", autouse=True)
def _forked_dry_runs() -> Iterator[None]:
    """Leave the start method that users have, "spawn", to the tests of tests/lightning_plugin/test_auto_layout.py."""
    multiprocessing.set_forkserver_preload(_PRELOADED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("weft.strategy.dry_run.process.START_METHOD", "forkserver")
        yield
