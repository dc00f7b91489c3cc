"""`make gpu` runs pytest's tests fastest first, stops before its limit, and keeps a record of what ran."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from benchmarks.gpu_package import BENCHMARKS, ROOT, test_records

TESTS = """
import time
import pytest

def test_compile(): pass
@pytest.mark.parametrize("world_size", [4, 2])
def test_ranks(world_size): pass
def test_plain(): pass
def test_fails(): assert 1 == 2, "values \\x00 differ"
def test_skips(): pytest.skip("no reason")
"""


def run_pytest(folder: Path, *arguments: str, **environment: str) -> int:
    """Run the plugin on FOLDER/test_some.py; return pytest's exit status."""
    settings = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
        "PYTHONPATH": str(BENCHMARKS),
        "WEFT_GPU_RECORDS": str(folder / "tests.jsonl"),
        **environment,
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "gpu.pytest_plugin", "-p", "no:cacheprovider", *arguments]
    command += ["-c", os.devnull, "--rootdir", str(folder), str(folder)]
    run = subprocess.run(command, cwd=folder, env=settings, capture_output=True, text=True, check=False, timeout=400)
    return run.returncode


def names_of(folder: Path) -> list[str]:
    lines = [json.loads(line) for line in (folder / "tests.jsonl").read_text().splitlines()]
    return [line["id"].rpartition("::")[2] for line in lines if "id" in line]


def test_order_is_by_estimate(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    assert run_pytest(tmp_path) == 1
    order = ["test_plain", "test_fails", "test_skips", "test_ranks[2]", "test_ranks[4]", "test_compile"]
    assert names_of(tmp_path) == order


def test_order_is_by_recorded_time(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    seconds = {"test_some.py::test_compile": 0.01, "test_some.py::test_plain": 100.0}
    recorded = tmp_path / "results.json"
    recorded.write_text(json.dumps({"parts": [{"name": "tests", "result": {"seconds_by_function": seconds}}]}))
    run_pytest(tmp_path, WEFT_GPU_RECORDED=str(recorded))
    names = names_of(tmp_path)
    assert names[0] == "test_compile" and names[-1] == "test_plain"


def test_records_become_summary_and_junit(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "test_absent.py").write_text("import nothing_of_this_name\n")
    run_pytest(tmp_path, "--continue-on-collection-errors")
    summary = test_records.collect(tmp_path)
    counts = {name: summary[name] for name in ("selected", "passed", "failed", "skipped", "not_run")}
    assert counts == {"selected": 6, "passed": 4, "failed": 2, "skipped": 1, "not_run": 0}
    assert "timed_out" not in summary
    assert "nothing_of_this_name" in summary["failures"][0]["text"] and "differ" in summary["failures"][1]["text"]
    assert set(summary["seconds_by_function"]) > {"test_some.py::test_ranks", "test_some.py::test_fails"}
    suite = ElementTree.parse(tmp_path / "tests.xml").getroot()
    assert suite.attrib["tests"] == "7" and suite.attrib["failures"] == "2" and suite.attrib["skipped"] == "1"
    assert len(suite.findall("testcase/failure")) == 2


def test_session_stops_before_the_limit(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    assert run_pytest(tmp_path, WEFT_GPU_PART_SECONDS="8") == 9  # the plugin keeps 8 seconds for the end
    summary = test_records.collect(tmp_path)
    assert summary["timed_out"] and summary["passed"] == 1 and summary["not_run"] == 5
    assert ElementTree.parse(tmp_path / "tests.xml").getroot().find("properties/property").attrib["value"] == "5"


def test_last_test_may_end_near_the_limit(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    assert run_pytest(tmp_path, "-k", "plain", WEFT_GPU_PART_SECONDS="8") == 0
    assert "timed_out" not in test_records.collect(tmp_path)


def test_killed_session_leaves_records(tmp_path: Path) -> None:
    text = TESTS + "\ndef test_inductor_kills():\n    import os\n    os._exit(7)\n"
    (tmp_path / "test_some.py").write_text(text)
    assert run_pytest(tmp_path, "-k", "plain or kills") == 7
    summary = test_records.collect(tmp_path)
    assert summary["passed"] == 1 and summary["not_run"] == 1 and summary["timed_out"]


def test_count_limits_the_tests(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    run_pytest(tmp_path, WEFT_GPU_TEST_COUNT="2")
    assert names_of(tmp_path) == ["test_plain", "test_fails"]


def test_only_skipped_tests_are_a_problem(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    assert run_pytest(tmp_path, "-k", "skips") == 0
    assert test_records.collect(tmp_path)["problem"] == "No test passed: 1 were selected, 1 skipped."


@pytest.mark.parametrize("num_workers", [2])
def test_workers_share_one_record(tmp_path: Path, num_workers: int) -> None:
    pytest.importorskip("xdist")
    (tmp_path / "test_some.py").write_text(TESTS)
    run_pytest(tmp_path, "-n", str(num_workers), "--maxschedchunk", "1")
    summary = test_records.collect(tmp_path)
    assert summary["selected"] == 6 and summary["passed"] == 4 and summary["failed"] == 1


def test_worker_that_dies_is_recorded(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    text = TESTS + "\ndef test_ends():\n    import os\n    os._exit(7)\n"
    (tmp_path / "test_some.py").write_text(text)
    run_pytest(tmp_path, "-n", "1", "--maxschedchunk", "1", "-k", "plain or ends or skips")
    summary = test_records.collect(tmp_path)
    assert (summary["passed"], summary["failed"], summary["skipped"]) == (1, 1, 1)
    assert "crashed" in summary["failures"][0]["text"]


def test_no_record_without_a_session(tmp_path: Path) -> None:
    assert test_records.collect(tmp_path) is None


CUDA_MARKS = ("cuda", "gpu", "cuda_runtime", "nccl")
LIST_MARKS = """
import pytest

class Marks:
    def pytest_collection_finish(self, session):
        for item in session.items:
            print("item", item.nodeid.partition("::")[0], *(mark.name for mark in item.iter_markers()))

pytest.main(["--collect-only", "-q", "-n", "0", "-m", "cuda or gpu or cuda_runtime or nccl", "tests"], [Marks()])
"""


def files_by_mark(items: list[list[str]]) -> dict[str, set[str]]:
    """Return the files that have tests with each of `CUDA_MARKS`; an item is its file and its marks."""
    return {mark: {path for path, *marks in items if mark in marks} for mark in CUDA_MARKS}


def test_every_file_with_a_cuda_test_is_found(request: pytest.FixtureRequest) -> None:
    """`make gpu` and `make test-cuda` search the text of files; pytest must select no test in another file."""
    items = request.session.items
    files = files_by_mark([[item.nodeid.partition("::")[0], *(m.name for m in item.iter_markers())] for item in items])
    if not all(files.values()):  # pytest runs only a few files
        command = [sys.executable, "-c", LIST_MARKS]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=500)
        files = files_by_mark([line.split()[1:] for line in run.stdout.splitlines() if line.startswith("item ")])
        assert all(files.values()), run.stdout + run.stderr
    assert files["cuda"] <= set(test_records.files_with_cuda_tests(ROOT))

    pattern = re.search(r"^CUDA_MARKS := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert pattern is not None
    search = ["grep", "-rlE", pattern[1], "tests", "--include=test_*.py"]
    found = subprocess.run(search, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert set().union(*files.values()) <= set(found)
