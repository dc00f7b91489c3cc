"""A pytest plugin: tests in the order of their expected time, a record of each, and an end before the limit.

Environment:
    WEFT_GPU_RECORDS: file to which a JSON line is appended for each test.
    WEFT_GPU_PART_SECONDS: the limit, counted from the import of this file.
    WEFT_GPU_RECORDED: results.json of an earlier run, for the expected times; it need not exist.
    WEFT_GPU_TEST_COUNT: the number of tests to run; 0: all.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gpu.test_records import MAX_TEXT

_START = time.monotonic()
_STOP_SECONDS = 8.0  # ranks and workers are closed in this time before the limit
_STOPPED_STATUS = 9
# Seconds of a test by words in its name, where no time is recorded. A test that compiles takes longest; with ranks, the
# first test of a file waits for their start.
_SLOW_WORDS = {
    "memory_gate": 30.0,
    "compile": 20.0,
    "inductor": 20.0,
    "export": 6.0,
    "fuzz": 6.0,
    "script": 4.0,
    "autocast": 2.0,
    "gradcheck": 1.0,
    "opcheck": 1.0,
}


def expected_seconds(function: str, num_ranks: int, recorded: Mapping[str, float]) -> float:
    """Return the recorded time of a test function, or an estimate from its name and its number of ranks."""
    if function in recorded:
        return recorded[function]
    file, _, name = function.rpartition("::")
    words = f"{Path(file).stem}_{name}"
    return 0.2 + 0.5 * num_ranks + max((value for word, value in _SLOW_WORDS.items() if word in words), default=0.0)


def function_of(item: pytest.Item) -> str:
    """Return the id of an item without its parameters."""
    return item.nodeid.partition("[")[0]


def num_ranks_of(item: pytest.Item) -> int:
    callspec = getattr(item, "callspec", None)
    parameters = callspec.params if callspec is not None else {}
    return parameters.get("world_size") or getattr(getattr(item, "function", None), "num_ranks", 0)


def recorded_seconds(path: Path) -> dict[str, float]:
    """Return {test function: seconds} of an earlier run; nothing if there was none."""
    if not path.is_file():
        return {}
    for part in json.loads(path.read_text())["parts"]:
        if part["name"] == "tests":
            return part.get("result", {}).get("seconds_by_function", {})
    return {}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    recorded = recorded_seconds(Path(os.environ.get("WEFT_GPU_RECORDED", "")))
    items.sort(key=lambda item: expected_seconds(function_of(item), num_ranks_of(item), recorded))
    count = int(os.environ.get("WEFT_GPU_TEST_COUNT", "0"))
    if count:
        config.hook.pytest_deselected(items=items[count:])
        del items[count:]


def pytest_collection_finish(session: pytest.Session) -> None:
    if not _is_worker() and session.items:
        _select(len(session.items))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(ids: list[str]) -> None:
    _select(len(ids))


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Record a file that cannot be imported like a failed test."""
    if report.failed and not _is_worker():
        text = str(report.longrepr)[-MAX_TEXT:]
        _record({"id": report.nodeid, "function": report.nodeid, "outcome": "failed", "seconds": 0.0, "text": text})


# A test's record, until its last phase has ended.
_records: dict[str, dict[str, Any]] = {}
_ended: set[str] = set()  # ids
_selected: list[int] = []  # the number of tests, once it is known


def _select(count: int) -> None:
    _selected.append(count)
    _record({"selected": count})


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if _is_worker():
        return
    record = _records.setdefault(
        report.nodeid, {"id": report.nodeid, "function": report.nodeid.partition("[")[0], "outcome": "passed"}
    )
    record["seconds"] = record.get("seconds", 0.0) + report.duration
    if report.failed or (report.skipped and record["outcome"] == "passed"):
        record["outcome"] = report.outcome
        record["text"] = report.longreprtext[-MAX_TEXT:] if report.failed else str(report.longrepr)[-MAX_TEXT:]
    if report.when not in ("setup", "call"):  # the last phase, or pytest-xdist's report of a worker that died
        _record(_records.pop(report.nodeid))
        _ended.add(report.nodeid)
        limit = float(os.environ.get("WEFT_GPU_PART_SECONDS", "inf"))
        if len(_ended) < max(_selected, default=0) and time.monotonic() - _START > limit - _STOP_SECONDS:
            _record({"stopped": round(time.monotonic() - _START, 1)})
            pytest.exit(f"stopped before the limit of {limit:.0f} s", returncode=_STOPPED_STATUS)


# Not from PYTEST_XDIST_WORKER: this pytest may have been started by a test that runs in a worker.
_configs: list[pytest.Config] = []


def pytest_configure(config: pytest.Config) -> None:
    _configs.append(config)


def _is_worker() -> bool:
    return any(hasattr(config, "workerinput") for config in _configs)


def _record(record: dict[str, Any]) -> None:
    with Path(os.environ["WEFT_GPU_RECORDS"]).open("a") as file:
        file.write(json.dumps(record) + "\n")
