"""`make gpu`: time limits, parts that fail without stopping others, results after each part, bounded files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from benchmarks.gpu_package import BENCHMARKS, ROOT, parts, processes, python_part, results, run, run_of


def report_of(tmp_path: Path) -> dict[str, dict[str, object]]:
    report = json.loads((tmp_path / "out" / "results.json").read_text())
    return {part["name"]: part for part in report["parts"]}


def test_failures_do_not_stop_later_parts(tmp_path: Path) -> None:
    chosen = [
        python_part("fails", "print('reason'); raise SystemExit(3)"),
        python_part("hangs", "import time; time.sleep(600)", most_seconds=1.5),
        python_part("broken", "pass", collect=lambda work: 1 / 0),
        parts.Part("absent", "Absent", ("/no/such/command",), 10.0, 60.0, needs_build=False),
        python_part("lacks", "pass", needs=("torch", "gpu")),
        python_part("unbuilt", "pass", needs_build=True),
        python_part("wrong", "pass", collect=lambda work: {"problem": "No test passed."}),
        python_part("good", "pass"),
    ]
    start = time.monotonic()
    assert not run_of(tmp_path, chosen, missing={"gpu": "no GPU", "cmake": "no cmake"}, has_package=False).run()
    assert time.monotonic() - start < 60
    rows = report_of(tmp_path)
    assert {name: row["status"] for name, row in rows.items()} == {
        "fails": "failed",
        "hangs": "timed out",
        "broken": "failed",
        "absent": "failed",
        "lacks": "skipped",
        "unbuilt": "skipped",
        "wrong": "failed",
        "good": "passed",
    }
    assert rows["fails"]["returncode"] == 3 and "status 3" in str(rows["fails"]["reason"])
    assert rows["broken"]["reason"] == "ZeroDivisionError: division by zero"
    assert "FileNotFoundError" in str(rows["absent"]["reason"])
    assert rows["lacks"]["reason"] == "Missing: gpu."
    assert rows["wrong"]["reason"] == "No test passed."
    log = (tmp_path / "out" / "log.txt").read_text()
    assert "==== Fails ====\nreason\n" in log and "==== Good ====" in log


def test_run_passes_if_all_parts_pass(tmp_path: Path) -> None:
    assert run_of(tmp_path, [python_part("one", "pass"), python_part("two", "pass")]).run()


def test_results_are_written_after_each_part(tmp_path: Path) -> None:
    """The second part sees the result of the first one, and itself as not run."""
    out = tmp_path / "out"
    first = python_part("first", "pass", collect=lambda work: {"figure": 7})
    code = f"import shutil; shutil.copy({str(out / 'results.json')!r}, {str(tmp_path / 'seen.json')!r})"
    assert run_of(tmp_path, [first, python_part("second", code)]).run()
    seen = {part["name"]: part for part in json.loads((tmp_path / "seen.json").read_text())["parts"]}
    assert seen["first"]["status"] == "passed" and seen["first"]["result"] == {"figure": 7}
    assert seen["second"]["status"] == "not run"
    assert "| First | passed |" in (out / "gpu.md").read_text()


def test_result_of_a_part_that_reached_its_limit_is_kept(tmp_path: Path) -> None:
    output = tmp_path / "work" / "slow.json"
    code = f"import time; open({str(output)!r}, 'w').write('{{\"rows\": 2}}'); time.sleep(600)"
    assert not run_of(tmp_path, [python_part("slow", code, most_seconds=3.0)]).run()
    assert report_of(tmp_path)["slow"]["result"] == {"rows": 2}


def test_no_process_survives_the_limit(tmp_path: Path) -> None:
    """The process has its own session, ignores SIGTERM, and its parent has ended."""
    pid_file = tmp_path / "pid"
    child = (
        "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        f"open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    )
    parent = (
        f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True)\n"
        f"import pathlib\nwhile not (pathlib.Path({str(pid_file)!r}).exists() and "
        f"pathlib.Path({str(pid_file)!r}).read_text()): time.sleep(0.05)\n"
    )
    outcome = processes.run_limited(
        [sys.executable, "-c", parent], seconds=30, log=tmp_path / "log", environment=dict(os.environ), folder=tmp_path
    )
    assert outcome.returncode == 0
    with pytest.raises(ProcessLookupError):
        for _ in range(100):  # until its new parent has reaped it
            os.kill(int(pid_file.read_text()), 0)
            time.sleep(0.1)


@pytest.mark.parametrize(
    ("index", "remaining", "limit"),
    [
        (0, 100.0, 50.0),  # 100 less the shares of the other parts
        (1, 70.0, 40.0),  # 50 are left after the third part's share, more than the part's maximum of 40
        (1, 35.0, 15.0),
        (2, 20.0, 20.0),
    ],
)
def test_unused_time_goes_to_the_next_part(index: int, remaining: float, limit: float) -> None:
    chosen = [
        parts.Part("a", "A", (), 50.0, 60.0),
        parts.Part("b", "B", (), 30.0, 40.0),
        parts.Part("c", "C", (), 20.0, 540.0),
    ]
    assert run.limit_of(index, chosen, remaining, 1.0) == limit


def test_part_without_time_is_not_started(tmp_path: Path) -> None:
    marker = tmp_path / "started"
    code = f"open({str(marker)!r}, 'w')"
    assert not run_of(tmp_path, [python_part("late", code)], total_seconds=5.5).run()
    assert not marker.exists()
    row = report_of(tmp_path)["late"]
    assert row["status"] == "timed out" and "WEFT_GPU_SECONDS" in str(row["reason"])


def test_shares_fit_the_default_total() -> None:
    chosen = parts.parts(parts.Options("cuda", False, Path("build"), Path("work"), 16, 4, True, "9.0"))
    names = ["build", "smoke", "tests", "kernels", "candidates", "memory", "step", "nccl", "memcheck", "racecheck"]
    assert [part.name for part in chosen] == names
    command = chosen[0].command
    assert command[command.index("--work") + 1] == "build"
    assert sum(part.share_seconds for part in chosen) <= parts.TOTAL_SECONDS < 600
    assert all(part.share_seconds <= part.most_seconds for part in chosen)


def test_measured_environment_is_not_that_of_the_build(tmp_path: Path) -> None:
    code = "import os; raise SystemExit(os.environ.get('WEFT_FOR_PARTS') != {!r})"
    chosen = [python_part("build", code.format(None)), python_part("smoke", code.format("x"), needs_build=True)]
    assert run_of(tmp_path, chosen, measured={"WEFT_FOR_PARTS": "x"}).run()


def test_files_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "MAX_FILE_BYTES", 1000)
    monkeypatch.setattr(results, "MAX_RESULT_BYTES", 500)
    work = tmp_path / "work"
    code = f"open({str(work / 'small.gz')!r}, 'w').write('x' * 1000)\n"
    code += f"open({str(work / 'large.gz')!r}, 'w').write('x' * 1001)"
    files = ("small.gz", "large.gz", "absent.gz")
    noisy = python_part("noisy", "print('a' * 99_999 + 'b' * 2_000_000 + 'c' * 900_000)")
    chosen = [
        python_part("writes", code, files=files),
        python_part("large", "pass", collect=lambda work: {"x": "y" * 600}),
        noisy,
    ]
    assert not run_of(tmp_path, chosen).run()
    out, rows = tmp_path / "out", report_of(tmp_path)
    assert {path.name for path in out.iterdir()} == {"results.json", "gpu.md", "log.txt", "small.gz"}
    assert rows["writes"]["notes"] == [
        "large.gz has 1001 bytes, more than 1000, and is left out.",
        "absent.gz was not written.",
    ]
    assert rows["large"]["status"] == "failed" and "more than 500" in str(rows["large"]["reason"])
    log = (out / "log.txt").read_text()
    assert len(log) < 1_010_000 and "bytes left out" in log and log.rstrip().endswith("c" * 899_000)


def test_too_many_files_raise(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="got 6 more files; at most 5 fit"):
        results.Results(tmp_path, {}, tuple("abcdef"))


def test_results_of_an_earlier_run_are_deleted(tmp_path: Path) -> None:
    (tmp_path / "trace.json.gz").write_text("old")
    (tmp_path / "other").write_text("not ours")
    results.Results(tmp_path, {}, ("trace.json.gz",))
    assert {path.name for path in tmp_path.iterdir()} == {"results.json", "gpu.md", "other"}


def start_command(tmp_path: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(BENCHMARKS / "gpu"), "--work", str(tmp_path / "work"), *arguments]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_command_without_torch_reports(tmp_path: Path) -> None:
    """OUT and WEFT_GPU_SECONDS are read, and every part is reported."""
    (tmp_path / "shadow").mkdir()
    (tmp_path / "shadow" / "torch.py").write_text("raise ImportError('broken torch')\n")
    out = tmp_path / "out"
    process = start_command(
        tmp_path, PYTHONPATH=str(tmp_path / "shadow"), OUT=str(out), WEFT_GPU_SECONDS="77", CUDA_VISIBLE_DEVICES=""
    )
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 1, text
    report = json.loads((out / "results.json").read_text())
    assert report["total_seconds"] == 77 and {part["status"] for part in report["parts"]} == {"skipped"}
    assert any("cannot import torch (ImportError: broken torch)" in sentence for sentence in report["missing"])
    assert "cannot import torch" in (out / "gpu.md").read_text()


def test_interrupted_command_keeps_results(tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = start_command(
        tmp_path, "--installed", "--device", "cpu", "--parts", "kernels", "--out", str(out), CUDA_VISIBLE_DEVICES=""
    )
    deadline = time.monotonic() + 120
    while not any((tmp_path / "work").glob("parts/kernels.log")) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    text, _ = process.communicate(timeout=60)
    assert process.returncode not in (0, None), text
    [row] = json.loads((out / "results.json").read_text())["parts"]
    assert row["status"] == "failed" and row["reason"] == "The run was interrupted."
