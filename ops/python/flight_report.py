"""Compares and draws the flight records of all ranks: see `weft.flight`."""

from __future__ import annotations

import html
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from weft.flight import read

__all__ = ["draw", "report"]

_NUM_CALLS = 512  # that a record has at most
_SECONDS_DRAWN = 10.0
_SECONDS_AFTER = 2.0  # of them after the begin of the first incomplete call
_ROW, _LABEL, _WIDTH = 24, 70, 1000  # of the drawing, in pixels
_COLORS = {"done": "#7aa6c2", "started": "#d62728", "failed": "#d62728"}


def report(directory: str | os.PathLike[str]) -> str:
    """Return a text on the records in a directory: the ranks without one, and the first incomplete calls.

    A line for each group names the first collective that did not complete on a rank, the ranks that have begun it, and
    those that have not; a line for each incomplete message names its peer. The group whose incomplete call began first
    comes first. Last comes a line for each rank: the error that its main thread has raised, or the innermost frame of
    this thread. Records of a job with another number of ranks than that of the newest record are named, and left out.

    Raises:
        FileNotFoundError, ValueError: see `weft.flight.read`.
    """
    records, num_ranks, others = _read_newest(directory)
    present = [record["rank"] for record in records]
    lines = [f"{len(records)} of {num_ranks} ranks have written a flight record."]
    if absent := sorted(set(range(num_ranks)) - set(present)):
        lines.append(
            f"No record: {_ranks(absent)}. "
            "A rank writes none if it has ended, is stopped, or is in C code that holds the GIL."
        )
    if others:
        lines.append(f"Left out, because of a job with another number of ranks: {_ranks(others)}.")
    begins: dict[tuple[str, tuple[int, ...]], float] = {}
    for call in (call for record in records for call in record["calls"] if call["state"] != "done"):
        group = (call["group"], tuple(call["ranks"]))
        begins[group] = min(call["begin"], begins.get(group, call["begin"]))
    for name, ranks in sorted(begins, key=lambda group: (begins[group], group)):
        lines += _incomplete_collective(records, name, list(ranks))
        lines += _incomplete_messages(records, name, list(ranks))
    lines += [f"rank {record['rank']} (pid {record['pid']}) {_position(record)}" for record in records]
    return "\n".join(lines)


def _read_newest(directory: str | os.PathLike[str]) -> tuple[list[dict[str, Any]], int, list[int]]:
    """Return the records of the newest record's job, its number of ranks, and the ranks of records of other jobs."""
    records = read(directory)
    num_ranks: int = max(records, key=lambda record: record["time"])["num_ranks"]
    others = [record["rank"] for record in records if record["num_ranks"] != num_ranks]
    return [record for record in records if record["num_ranks"] == num_ranks], num_ranks, others


def _position(record: dict[str, Any]) -> str:
    if record["writer"] == "MainThread":
        lines = record["error"].strip().splitlines()
        return f"raised {lines[-1] if lines else 'an error without a text'}"
    stacks = [stack for name, stack in record["stacks"].items() if name.startswith("MainThread")]
    return "was at " + " ".join(stacks[0][-1].split()) if stacks and stacks[0] else "has no main thread"


def _incomplete_collective(records: list[dict[str, Any]], name: str, ranks: list[int]) -> list[str]:
    """Return the line on the first collective of a group that is incomplete on a rank, if there is one."""
    calls = {record["rank"]: _collectives_of(record, name, ranks) for record in records if record["rank"] in ranks}
    full = {record["rank"] for record in records if len(record["calls"]) >= _NUM_CALLS}
    incomplete = [n for by_number in calls.values() for n, call in by_number.items() if call["state"] != "done"]
    if not incomplete:
        return []
    first = min(incomplete)
    begun: dict[str, list[int]] = {}
    missing, unknown = [], []
    for rank, by_number in calls.items():
        if first in by_number:
            begun.setdefault(by_number[first]["call"], []).append(rank)
        elif not by_number and rank in full:
            unknown.append(rank)
        elif max(by_number, default=0) < first:
            missing.append(rank)
    text = f"group {name!r} of {_ranks(ranks)}, collective {first}: "
    text += "; ".join(f"{_ranks(by)} called {call}" for call, by in begun.items())
    if missing:
        text += f"; missing: {_ranks(missing)}"
    if unknown:
        text += f"; unknown, because the newest {_NUM_CALLS} calls are of other groups: {_ranks(unknown)}"
    if absent := sorted(set(ranks) - set(calls)):
        text += f"; no record: {_ranks(absent)}"
    return [text + "."]


def _incomplete_messages(records: list[dict[str, Any]], name: str, ranks: list[int]) -> list[str]:
    return [
        f"group {name!r} of {_ranks(ranks)}: rank {record['rank']} called {call['call']}, {call['bytes']} bytes."
        for record in records
        for call in record["calls"]
        if call["group"] == name and call["ranks"] == ranks and call["sequence"] == 0 and call["state"] != "done"
    ]


def _collectives_of(record: dict[str, Any], group: str, ranks: list[int]) -> dict[int, dict[str, Any]]:
    """Return a group's collectives by number; only those of the newest group if a process has made several of a name.

    torch gives the same names again after `destroy_process_group`.
    """
    calls: dict[int, dict[str, Any]] = {}
    for call in record["calls"]:
        if call["group"] == group and call["ranks"] == ranks and call["sequence"] > 0:
            if call["sequence"] == 1:
                calls.clear()
            calls[call["sequence"]] = call
    return calls


def _ranks(ranks: Iterable[int]) -> str:
    """Return "rank 3", or "ranks 0, 2 to 5"."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    parts = [f"{a}" if a == b else f"{a}, {b}" if b == a + 1 else f"{a} to {b}" for a, b in spans]
    return f"rank{'' if len(spans) == 1 and spans[0][0] == spans[0][1] else 's'} {', '.join(parts)}"


def draw(directory: str | os.PathLike[str], path: str | os.PathLike[str] | None = None) -> str:
    """Return an SVG of the calls of all ranks around the begin of the first incomplete call: 10 seconds.

    A row for each rank: a bar for each call, from its begin to its end, in red if it is not done. A text shows the call
    when the mouse is on its bar. The times are those of the hosts' clocks.

    Args:
        directory: the records.
        path: the file to write, if given.

    Raises:
        FileNotFoundError, ValueError: see `weft.flight.read`.
    """
    newest, num_ranks, _ = _read_newest(directory)
    records = {record["rank"]: record for record in newest}
    last = max(record["time"] for record in records.values())
    begins = [call["begin"] for record in records.values() for call in record["calls"] if call["state"] != "done"]
    last = min([last, *(begin + _SECONDS_AFTER for begin in begins)])
    height = _ROW * (num_ranks + 2)
    rows = []
    for rank in range(num_ranks):
        y = _ROW * (rank + 1)
        rows.append(f'<text x="4" y="{y + 16}">rank {rank}</text>')
        if rank not in records:
            rows.append(f'<text x="{_LABEL}" y="{y + 16}" fill="{_COLORS["failed"]}">no record</text>')
            continue
        rows += [_bar(call, y, records[rank]["time"], last) for call in records[rank]["calls"]]
    title = f'<text x="{_LABEL}" y="16">{_SECONDS_DRAWN:.0f} s around the first incomplete call</text>'
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LABEL + _WIDTH + 10}" height="{height}" '
        f'font-family="sans-serif" font-size="12">\n{title}\n' + "\n".join(row for row in rows if row) + "\n</svg>\n"
    )
    if path is not None:
        Path(path).write_text(svg)
    return svg


def _bar(call: dict[str, Any], y: int, recorded: float, last: float) -> str:
    """Return the bar of a call; "" if the call is outside of the drawn time."""
    end = recorded if call["end"] is None else call["end"]
    begin, end = (min(max(0.0, time - last + _SECONDS_DRAWN) / _SECONDS_DRAWN, 1.0) for time in (call["begin"], end))
    if end == 0 or begin == 1:
        return ""
    number = f", collective {call['sequence']}" if call["sequence"] else ""
    text = html.escape(f"{call['call']}, {call['bytes']} bytes, group {call['group']}{number}: {call['state']}")
    width = max(1.0, _WIDTH * (end - begin))
    return (
        f'<rect x="{_LABEL + _WIDTH * begin:.1f}" y="{y + 2}" width="{width:.1f}" height="{_ROW - 4}" '
        f'fill="{_COLORS[call["state"]]}"><title>{text}</title></rect>'
    )
