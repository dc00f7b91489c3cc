"""Flight records of a run of four ranks, of which two get stuck: which ranks write one, and what the report says."""

from __future__ import annotations

import re
import sys
import time
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


def _run(folder: Path) -> str:
    """Run until the ranks that are not stuck time out, and the job ends; return stderr."""
    with ProcessTree([sys.executable, SCRIPT, folder], env=ENVIRONMENT, warm_processes=4) as tree:
        result = tree.wait(240)
        assert_nothing_left(tree.pgid, within=5.0)
        assert result.returncode != 0, result.stderr
        return result.stderr


def test_stuck_ranks_are_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A rank that runs Python code writes a record, although it gets no error; a stopped process cannot."""
    text = _run(tmp_path)
    assert re.search(rf"CollectiveTimeoutError: weft: {CALL} .* not arrived rank 1 \(pid \d+\), rank 2 ", text), text
    records = flight.read(tmp_path)
    assert [record["rank"] for record in records] == [0, 2, 3] and records[0]["num_ranks"] == 4
    for record in records:
        states = {call["state"] for call in record["calls"]}
        assert states == ({"done"} if record["rank"] == 2 else {"done", "failed"})
        assert re.search("CollectiveTimeoutError|timed out after 8 s", record["error"])
        assert "weft-flight-watch" in " ".join(record["stacks"])
    monkeypatch.setattr(sys, "argv", ["weft", "flight", str(tmp_path)])
    assert weft_command.main() == 0
    report = capsys.readouterr().out
    line = (
        rf"group '0' of ranks 0 to 3, collective (\d+): ranks 0, 3 called {CALL}; missing: rank 2; no record: rank 1\."
    )
    found = re.search(line, report)
    assert found is not None, report
    assert "No record: rank 1." in report
    assert re.search(r"rank 2 \(pid \d+\) was at File .*stuck.py.*, in stuck_here time.sleep\(1\)", report)
    drawing = (tmp_path / "flight.svg").read_text()
    assert drawing.count(">rank ") == 4 and drawing.count("no record") == 1
    assert len(re.findall(rf'fill="#d62728"><title>{CALL}, .*: failed', drawing)) == 2
    _check_torch_report(tmp_path / "torch", found[1], caplog)


def _check_torch_report(folder: Path, sequence: str, caplog: pytest.LogCaptureFixture) -> None:
    """torch's analyser names the missing ranks, too."""
    if not folder.exists():  # torch before 2.15
        return
    from torch.distributed.flight_recorder import fr_trace

    fr_trace.main([str(folder), "-p", "rank_"])
    assert f"Not all ranks joining collective, sequence number: {sequence}" in caplog.text, caplog.text
    assert "missing ranks: {1, 2}" in caplog.text and "collective state: scheduled" in caplog.text


def test_record_of_communication_errors_only(tmp_path: Path) -> None:
    watch = FlightWatch(tmp_path / "flight", rank=3, num_ranks=4)
    try:
        watch.record(RuntimeError("of the model"))
        watch.record(_raised_while_handling(weft.PeerLostError("rank 1 has ended"), from_none=True))
        watch.record(_its_own_cause())
        assert not (tmp_path / "flight").exists()
        watch.record(_raised_while_handling(weft.PeerLostError("rank 2 has ended"), from_none=False))
        watch.record(weft.CollectiveTimeoutError("a consequence"))
    finally:
        watch.stop()
    [record] = flight.read(tmp_path / "flight")
    assert record["rank"] == 3 and record["num_ranks"] == 4 and record["writer"] == "MainThread"
    assert "rank 2 has ended" in record["error"] and "a consequence" not in record["error"]


def _raised_while_handling(cause: Exception, from_none: bool) -> Exception:
    with pytest.raises(RuntimeError) as caught:
        try:
            raise cause
        except Exception:
            if from_none:
                raise RuntimeError("of the optimizer") from None
            raise RuntimeError("of the optimizer")  # noqa: B904
    return caught.value


def _its_own_cause() -> Exception:
    error = RuntimeError("of the optimizer")
    error.__cause__ = error
    return error


def test_earlier_record_is_set_aside(tmp_path: Path) -> None:
    """Another rank's stays, until that rank starts."""
    for rank in (0, 1):
        flight.write(tmp_path, rank, 2, "of the first run")
    has_trace = (tmp_path / "torch" / "rank_0").exists()
    FlightWatch(tmp_path, rank=0, num_ranks=2).stop()
    assert [record["rank"] for record in flight.read(tmp_path)] == [1]
    assert [record["rank"] for record in flight.read(tmp_path / "previous")] == [0]
    assert not (tmp_path / "torch" / "rank_0").exists()
    assert (tmp_path / "previous" / "torch" / "rank_0").exists() == has_trace
    flight.write(tmp_path, 0, 2, "of the second run")
    FlightWatch(tmp_path, rank=0, num_ranks=2).stop()
    assert [record["error"] for record in flight.read(tmp_path / "previous")] == ["of the second run"]


def test_stuck_rank_writes_its_own_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure that is older than the watch is not its own."""
    texts = ["an old failure"]
    monkeypatch.setattr(flight, "failures", lambda: list(texts))
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
    assert any("test_stuck_rank_writes_its_own_record" in frame for frame in main)


def test_unwritable_directory_warns(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    watch = FlightWatch(tmp_path / "file", rank=2, num_ranks=4)
    try:
        with pytest.warns(UserWarning, match="weft: rank 2 cannot write its flight record: .*exists"):
            watch.record(weft.PeerLostError("rank 0 has ended"))
    finally:
        watch.stop()


def test_failure_to_write_does_not_hide_the_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no trace")

    monkeypatch.setattr(flight, "write", fail)
    watch = FlightWatch(tmp_path, rank=2, num_ranks=4)
    try:
        with pytest.warns(UserWarning, match="weft: rank 2 cannot write its flight record: no trace"):
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
