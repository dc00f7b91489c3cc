"""The log of calls, the seconds that a thread waits, and the report on records of several ranks."""

from __future__ import annotations

import json
import os
import pickle
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import weft
from ops.collectives.hosts import across_hosts
from support.ranks import on_ranks
from weft import flight, flight_report


def _log(group: dist.ProcessGroup) -> list[dict[str, Any]]:
    return [call for call in weft._collectives.flight_log() if call["group"] == group.group_name]


@on_ranks(2)
@across_hosts("aa", "ab")
def test_log_of_calls(rank: int, world_size: int) -> None:
    before = time.time()
    group = dist.new_group(backend="cpu:weft")
    dist.all_reduce(torch.ones(3, 2), group=group)
    dist.all_gather([torch.empty(5), torch.empty(5)], torch.ones(5), group=group)
    if rank == 0:
        dist.send(torch.ones(7, dtype=torch.float64), 1, group=group, tag=3)
    else:
        dist.recv(torch.ones(7, dtype=torch.float64), 0, group=group, tag=3)
    dist.barrier(group)
    calls = _log(group)
    message = "send(to rank 1, tag 3)" if rank == 0 else "recv(from rank 0, tag 3)"
    found = [(call["sequence"], call["call"], call["bytes"]) for call in calls]
    expected = [(1, "all_reduce(sum, float32 [3, 2])", 24), (2, "all_gather(float32 5 elements)", 20)]
    assert found == [*expected, (0, message, 56), (3, "barrier()", 0)]
    for call in calls:
        assert call["state"] == "done" and call["ranks"] == [0, 1]
        assert before <= call["begin"] <= call["end"] <= time.time()


@on_ranks(2)
def test_log_keeps_the_newest_calls(rank: int) -> None:
    group = dist.new_group(backend="cpu:weft")
    for _ in range(700):
        dist.barrier(group)
    assert [call["sequence"] for call in _log(group)] == list(range(700 - 512 + 1, 701))


@on_ranks(2)
def test_failed_and_started_calls(rank: int) -> None:
    group = dist.new_group(backend="cpu:weft", timeout=timedelta(seconds=30))
    dist.barrier()
    if rank == 0:
        work = dist.all_reduce(torch.ones(4), group=group, async_op=True)
        [call] = _log(group)
        assert call["state"] == "started" and call["end"] is None
        with pytest.raises(weft.CollectiveTimeoutError):
            work.wait(timedelta(seconds=0.2))
        assert [call["state"] for call in _log(group)] == ["failed"]
    deadline = time.monotonic() + 20
    while not flight.failures() and time.monotonic() < deadline:  # also on the rank that makes no call
        time.sleep(0.01)
    [text] = flight.failures()
    assert "all_reduce(sum, float32 [4])" in text
    with pytest.raises(weft.CollectiveTimeoutError):
        dist.barrier(group)
    assert _log(group)[-1]["state"] == "failed"
    dist.destroy_process_group(group)


@on_ranks(2)
def test_failures_of_all_groups_that_are_not_left(rank: int) -> None:
    groups = [dist.new_group(backend="cpu:weft") for _ in range(2)]
    names = [f"of group '{group.group_name}'" for group in groups]
    works = []
    for num_failed, group in enumerate(groups, 1):
        works.append(dist.all_reduce(torch.ones(2 + rank), group=group, async_op=True))
        with pytest.raises(weft.CollectiveMismatchError):
            works[-1].wait()
        texts = flight.failures()
        assert len(texts) == num_failed and all(name in text for name, text in zip(names, texts, strict=False)), texts
    dist.destroy_process_group(groups[0])  # the work keeps the group's memory alive
    [text] = flight.failures()
    assert names[1] in text
    dist.destroy_process_group(groups[1])
    assert flight.failures() == []


@on_ranks(2)
def test_call_without_tensors_is_done(rank: int) -> None:
    group = dist.new_group(backend="cpu:weft")
    backend = group._get_backend(torch.device("cpu"))
    backend.allreduce_coalesced([], dist.AllreduceCoalescedOptions())
    assert [call["state"] for call in _log(group)] == ["done"]


@on_ranks(2)
def test_fork_while_a_thread_looks_for_failures(rank: int) -> None:
    """The child can look for failures, too: no lock that the thread holds stays locked."""
    groups = [dist.new_group(backend="cpu:weft") for _ in range(5)]
    if rank == 0:
        _fork_while_a_thread_looks_for_failures()
    for group in groups:
        dist.destroy_process_group(group)


def _fork_while_a_thread_looks_for_failures() -> None:
    stopped = threading.Event()

    def look() -> None:
        while not stopped.is_set():
            flight.failures()

    thread = threading.Thread(target=look)
    thread.start()
    try:
        for _ in range(20):
            pid = os.fork()
            if pid == 0:
                signal.alarm(20)  # ends a child that hangs
                flight.failures()
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0
    finally:
        stopped.set()
        thread.join()


@on_ranks(2)
@across_hosts("aa", "ab")
def test_seconds_waited(rank: int) -> None:
    """Only the thread that waits counts, and only while it waits."""
    group = dist.new_group(backend="cpu:weft")
    dist.barrier(group)
    before = weft.collectives.seconds_waited()
    if rank == 1:
        time.sleep(0.5)
        assert weft.collectives.seconds_waited() == before
    dist.all_reduce(torch.ones(4), group=group)
    waited = weft.collectives.seconds_waited() - before
    assert waited > 0.05 if rank == 0 else waited > 0
    in_thread: list[float] = []
    thread = threading.Thread(target=lambda: in_thread.append(weft.collectives.seconds_waited()))
    thread.start()
    thread.join()
    assert in_thread == [0.0]


@on_ranks(2)
def test_torch_records_completion(rank: int) -> None:
    """Also of asynchronous calls, which a background thread completes."""
    from torch._C import _distributed_c10d as c10d

    if not hasattr(c10d, "FlightRecorderHook"):
        pytest.skip("torch before 2.15 records no calls of other backends")
    group = dist.new_group(backend="cpu:weft", group_desc="recorded")
    for _ in range(20):
        works = [dist.all_reduce(torch.ones(4), group=group, async_op=True) for _ in range(3)]
        for work in works:
            work.wait()
    entries = pickle.loads(c10d._dump_fr_trace(backend="weft"))["entries"]
    entries = [entry for entry in entries if entry["process_group"][1] == "recorded"]
    assert len(entries) == 60
    assert {entry["state"] for entry in entries} == {"completed"}


def _write(
    folder: Path,
    rank: int,
    calls: list[tuple[str, int, str, str]],
    num_ranks: int = 3,
    time: float = 105.0,
    error: str = "late\n",
    ranks: tuple[int, ...] = (0, 1, 2),
) -> None:
    """Write a record with calls of (group, sequence, call, state)."""
    rows = [
        {"group": group, "ranks": ranks, "sequence": n, "call": call, "bytes": 8, "state": state}
        | {"begin": 100.0 + i, "end": None if state == "started" else 100.5 + i}
        for i, (group, n, call, state) in enumerate(calls)
    ]
    record = {"rank": rank, "num_ranks": num_ranks, "host": "a", "pid": 7, "time": time, "error": error}
    record |= {"writer": "MainThread", "calls": rows, "stacks": {"MainThread (1)": ["  File <a>, in f\n    g()"]}}
    (folder / f"flight-rank-{rank:05}.json").write_text(json.dumps(record))


def test_report_of_a_mismatch(tmp_path: Path) -> None:
    _write(tmp_path, 0, [("0", 1, "a()", "done"), ("0", 2, "a()", "failed"), ("1", 5, "c()", "started")])
    _write(tmp_path, 1, [("0", 1, "a()", "done"), ("0", 2, "b()", "failed")])
    _write(tmp_path, 2, [("0", 2, "a()", "failed"), ("0", 3, "a()", "started"), ("0", 0, "send(to rank 1)", "started")])
    lines = flight_report.report(tmp_path).splitlines()
    assert lines == [
        "3 of 3 ranks have written a flight record.",
        "group '0' of ranks 0 to 2, collective 2: ranks 0, 2 called a(); rank 1 called b().",
        "group '0' of ranks 0 to 2: rank 2 called send(to rank 1), 8 bytes.",
        "group '1' of ranks 0 to 2, collective 5: rank 0 called c(); missing: ranks 1, 2.",
        *(f"rank {rank} (pid 7) raised late" for rank in range(3)),
    ]


def test_report_of_a_rank_whose_calls_are_of_other_groups(tmp_path: Path) -> None:
    """Its 512 calls may have replaced those of the group."""
    _write(tmp_path, 0, [("0", 8, "a()", "failed")])
    _write(tmp_path, 1, [("1", n + 1, "b()", "done") for n in range(512)])
    _write(tmp_path, 2, [("1", n + 1, "b()", "done") for n in range(511)])
    assert flight_report.report(tmp_path).splitlines()[1] == (
        "group '0' of ranks 0 to 2, collective 8: rank 0 called a(); missing: rank 2; "
        "unknown, because the newest 512 calls are of other groups: rank 1."
    )


def test_report_of_groups_with_equal_names(tmp_path: Path) -> None:
    """A name is given again after its group was destroyed, perhaps to other ranks."""
    old = [("0", 5, "old()", "failed"), ("0", 6, "old()", "failed")]
    _write(tmp_path, 0, [*old, ("0", 1, "a()", "done"), ("0", 2, "b()", "started")])
    _write(tmp_path, 1, [*old, ("0", 1, "a()", "done")])
    _write(tmp_path, 2, [("0", 3, "c()", "done")], ranks=(1, 2))
    lines = flight_report.report(tmp_path).splitlines()
    assert [line for line in lines if line.startswith("group")] == [
        "group '0' of ranks 0 to 2, collective 2: rank 0 called b(); missing: ranks 1, 2."
    ]


def test_report_begins_with_the_first_incomplete_call(tmp_path: Path) -> None:
    _write(tmp_path, 0, [("1", 1, "b()", "failed"), ("0", 1, "a()", "started")], error="")
    lines = flight_report.report(tmp_path).splitlines()
    assert [line[:9] for line in lines[2:4]] == ["group '1'", "group '0'"]
    assert lines[4] == "rank 0 (pid 7) raised an error without a text"


def test_report_leaves_out_records_of_a_job_of_another_size(tmp_path: Path) -> None:
    _write(tmp_path, 0, [("0", 1, "a()", "failed")], num_ranks=2, time=200.0)
    for rank in (1, 2, 3):
        _write(tmp_path, rank, [("0", 1, "old()", "failed")], num_ranks=4)
    text = flight_report.report(tmp_path)
    assert text.startswith("1 of 2 ranks have written a flight record.\nNo record: rank 1.")
    assert "Left out, because of a job with another number of ranks: ranks 1 to 3." in text and "old()" not in text
    assert flight_report.draw(tmp_path).count(">rank ") == 2


def test_report_of_missing_ranks_and_records(tmp_path: Path) -> None:
    """A call that is older than the oldest of a record is not missing."""
    _write(tmp_path, 0, [("0", 8, "<a>", "failed")], num_ranks=5)
    _write(tmp_path, 1, [("0", 7, "<a>", "done")], num_ranks=5)
    lines = flight_report.report(tmp_path).splitlines()
    assert lines[1] == (
        "No record: ranks 2 to 4. A rank writes none if it has ended, is stopped, or is in C code that holds the GIL."
    )
    expected = "group '0' of ranks 0 to 2, collective 8: rank 0 called <a>; missing: rank 1; no record: rank 2."
    assert lines[2] == expected
    _write(tmp_path, 2, [("0", 9, "<a>", "failed")], num_ranks=5)
    expected = "group '0' of ranks 0 to 2, collective 8: rank 0 called <a>; missing: rank 1."
    assert flight_report.report(tmp_path).splitlines()[2] == expected
    svg = flight_report.draw(tmp_path, tmp_path / "drawn.svg")
    assert (tmp_path / "drawn.svg").read_text() == svg
    # 10 s are 1000 pixels, and end 2 s after the begin of the first incomplete call.
    assert svg.count('<rect x="870.0" y="26" width="50.0" height="20" fill="#d62728">') == 1
    assert svg.count("<rect ") == 3 and svg.count("no record") == 2 and "&lt;a&gt;" in svg
