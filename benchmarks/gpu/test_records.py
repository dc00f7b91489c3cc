"""Reads the lines that `gpu.pytest_plugin` writes for each test, into a summary and a JUnit file.

pytest's own JUnit file is written at the end of a session, so that a killed session would leave none.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

_MARKS = re.compile(r"\bmark\.cuda\b|on_device\(\s*\"cuda\"")
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
MAX_FAILURES = 60  # failed tests whose texts are in results.json; the JUnit file has the texts of all
MAX_TEXT = 4000  # characters of a failure


def files_with_cuda_tests(root: Path) -> list[str]:
    """Return the test files that contain a test marked cuda, relative to `root`: collecting all files takes longer."""
    found = [path for path in (root / "tests").rglob("test_*.py") if _MARKS.search(path.read_text())]
    return sorted(path.relative_to(root).as_posix() for path in found)


def collect(work: Path, name: str = "tests") -> dict[str, Any] | None:
    """Return the summary of WORK/NAME.jsonl, and write WORK/NAME.xml."""
    path = work / f"{name}.jsonl"
    if not path.is_file():
        return None
    records = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    # Each worker reports a file that it cannot import.
    tests = list({record["id"]: record for record in records if "id" in record}.values())
    selected = max((record["selected"] for record in records if "selected" in record), default=0)
    failed = [test for test in tests if test["outcome"] == "failed"]
    outcomes = Counter(test["outcome"] for test in tests)
    num_selected = sum("::" in test["id"] for test in tests)  # without files that could not be imported
    _write_junit(work / f"{name}.xml", tests, max(0, selected - num_selected))
    result: dict[str, Any] = {
        "selected": selected,
        **{name: outcomes[name] for name in ("passed", "failed", "skipped")},
        "not_run": max(0, selected - num_selected),
        "failures": [{"id": test["id"], "text": test["text"][-1200:]} for test in failed[:MAX_FAILURES]],
        "seconds_by_function": _seconds_by_function(tests),
    }
    if result["not_run"]:
        result["timed_out"] = True
    elif not outcomes["passed"]:
        result["problem"] = f"No test passed: {selected} were selected, {outcomes['skipped']} skipped."
    return result


def _seconds_by_function(tests: list[dict[str, Any]]) -> dict[str, float]:
    """Return the mean seconds of a case by test function, by which the next run orders its tests."""
    seconds: dict[str, list[float]] = {}
    for test in tests:
        if test["outcome"] != "skipped":
            seconds.setdefault(test["function"], []).append(test["seconds"])
    return {name: round(sum(values) / len(values), 3) for name, values in sorted(seconds.items())}


def _write_junit(path: Path, tests: list[dict[str, Any]], not_run: int) -> None:
    failures = sum(test["outcome"] == "failed" for test in tests)
    skipped = sum(test["outcome"] == "skipped" for test in tests)
    suite = ElementTree.Element(
        "testsuite", name="cuda", tests=str(len(tests)), failures=str(failures), skipped=str(skipped)
    )
    properties = ElementTree.SubElement(suite, "properties")
    ElementTree.SubElement(properties, "property", name="not_run", value=str(not_run))
    for test in tests:
        file, _, name = test["id"].partition("::")
        case = ElementTree.SubElement(suite, "testcase", classname=file, name=name, time=f"{test['seconds']:.3f}")
        if test["outcome"] != "passed":
            kind = "failure" if test["outcome"] == "failed" else "skipped"
            text = _NOT_XML.sub("?", test["text"])
            ElementTree.SubElement(
                case, kind, message=text.strip().splitlines()[-1] if text.strip() else ""
            ).text = text
    ElementTree.ElementTree(suite).write(path, encoding="utf-8", xml_declaration=True)
