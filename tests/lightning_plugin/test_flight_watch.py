"""Flight records of runs of three ranks, of which one gets stuck: which ranks write one, and what the report says."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import weft
import weft_command
from support.processes import ProcessTree, assert_nothing_left
from weft import flight
from weft._plugin.flight_watch import FlightWatch

SCRIPT = Path(__file__).parent / "scripts" / "stuck.py"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(Path(__file__).parents[1])}
CALL = r"all_reduce\(sum, float64 \[312\]\)"


def _run(folder: Path, how: str) -> str:
    """Run until the ranks that are not stuck time out, and the job ends; return stderr."""
    with ProcessTree([sys.executable, SCRIPT, folder, how], env=ENVIRONMENT, warm_processes=3) as tree:
        result = tree.wait(240)
        assert_nothing_left(tree.pgid, within=5.0)
        assert result.returncode != 0, result.stderr
        return result.stderr


def _weft(*arguments: str | Path, module: str = "weft") -> str:
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    return done.stdout + done.stderr


def test_stuck_rank_is_named(tmp_path: Path) -> None:
    """A rank that runs Python code writes a record, although it gets no error; a stopped process cannot."""
    folders = [tmp_path / "stop", tmp_path / "sleep"]
    with ThreadPoolExecutor() as pool:
        texts = list(pool.map(_run, folders, ("stop", "sleep")))
    for folder, text, ranks in zip(folders, texts, ([0, 2], [0, 1, 2]), strict=True):
        assert re.search(rf"CollectiveTimeoutError: weft: {CALL} .* not arrived rank 1", text), text
        records = flight.read(folder)
        assert [record["rank"] for record in records] == ranks and records[0]["num_ranks"] == 3
        for record in records:
            states = {call["state"] for call in record["calls"]}
            assert states == ({"done"} if record["rank"] == 1 else {"done", "failed"})
            assert re.search("CollectiveTimeoutError|timed out after 3 s", record["error"])
            assert "weft-flight-watch" in " ".join(record["stacks"])
        report = _weft("flight", folder)
        absent = "; no record: rank 1" if folder.name == "stop" else "; missing: rank 1"
        line = rf"group '0' of ranks 0 to 2, collective (\d+): ranks 0, 2 called {CALL}{absent}\."
        found = re.search(line, report)
        assert found is not None, report
        assert ("No record: rank 1." in report) == (folder.name == "stop")
        drawing = (folder / "flight.svg").read_text()
        assert drawing.count(">rank ") == 3
        assert len(re.findall(rf'fill="#d62728"><title>{CALL}, .*: failed', drawing)) == 2
        assert ("no record" in drawing) == (folder.name == "stop")
        if folder.name == "sleep":
            assert re.search(r"rank 1 \(pid \d+\) was at File .*stuck.py.*, in stuck_here time.sleep\(1\)", report)
            _check_torch_report(folder / "torch", found[1])


def _check_torch_report(folder: Path, sequence: str) -> None:
    """torch's analyser names the missing rank, too."""
    if not folder.exists():  # torch before 2.15
        return
    text = _weft(folder, "-p", "rank_", module="torch.distributed.flight_recorder.fr_trace")
    assert f"Not all ranks joining collective, sequence number: {sequence}" in text, text
    assert "missing ranks: {1}" in text and "collective state: scheduled" in text


def test_record_of_communication_errors_only(tmp_path: Path) -> None:
    watch = FlightWatch(tmp_path / "flight", rank=3, num_ranks=4)
    try:
        watch.record(RuntimeError("of the model"))
        assert not (tmp_path / "flight").exists()
        try:
            raise RuntimeError("of the optimizer") from weft.PeerLostError("rank 2 has ended")
        except RuntimeError as error:
            watch.record(error)
        watch.record(weft.CollectiveTimeoutError("a consequence"))
    finally:
        watch.stop()
    [record] = flight.read(tmp_path / "flight")
    assert record["rank"] == 3 and record["num_ranks"] == 4 and record["writer"] == "MainThread"
    assert "rank 2 has ended" in record["error"] and "a consequence" not in record["error"]


def test_stuck_rank_writes_its_own_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure that is older than the watch is not its own."""
    texts = ["an old failure"]
    monkeypatch.setattr(flight, "failure", lambda: texts[-1])
    watch = FlightWatch(tmp_path / "flight", rank=0, num_ranks=1)
    try:
        time.sleep(0.5)
        assert not (tmp_path / "flight").exists()
        texts.append("late")
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob("flight/flight-rank-*.json")) and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        watch.stop()
    [record] = flight.read(tmp_path / "flight")
    assert record["error"] == "late" and record["writer"] == "weft-flight-watch"
    [main] = [stack for name, stack in record["stacks"].items() if name.startswith("MainThread")]
    assert "test_stuck_rank_writes_its_own_record" in main[-1]


def test_unwritable_directory_warns(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    watch = FlightWatch(tmp_path / "file", rank=2, num_ranks=4)
    try:
        with pytest.warns(UserWarning, match="weft: rank 2 cannot write its flight record: .*exists"):
            watch.record(weft.PeerLostError("rank 0 has ended"))
    finally:
        watch.stop()


def test_command_without_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["weft", "flight", str(tmp_path)])
    assert weft_command.main() == 2
    assert capsys.readouterr().err.startswith(f"weft flight: '{tmp_path}' has no flight records; pass a directory")


def test_directory_without_records(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no flight records; pass a directory with flight-rank-\*.json"):
        flight.read(tmp_path)
    (tmp_path / "flight-rank-00000.json").write_text("{}")
    with pytest.raises(ValueError, match="is no flight record"):
        flight.read(tmp_path)
    (tmp_path / "flight-rank-00000.json").write_text('{"rank')
    with pytest.raises(ValueError, match="is no flight record"):
        flight.read(tmp_path)
