"""The data of a run's report: written by the callback `Report`, checked and drawn by `weft report`.

A JSON object:

- "version": 1.
- "run": "module", "status", "layout", "num_ranks", "num_steps", "mesh" ([[axis, size], ...]), "summary" (sentences of
  the start) and "facts" (texts by name).
- "points": for a step each, {"step", "values"}: numbers by name, None if not finite. "seconds" is the mean time of a
  step and "mean loss" the mean loss of rank 0 since the last point; "samples_per_second" and the scalars that the run
  logs are others.
- "ranks": for each rank "rank", "stages" (without a pipeline: []), "memory" ({"peak": bytes by category, "phases":
  [[name, bytes by category]]}), "times" (seconds of a step by "compute", "wait" and "loader", each None if waiting is
  not measured) and "communication" ({"axes": {axis: [calls, bytes]}, "is_truncated"}).
- "memory": {"predicted": bytes of a rank or None}.
- "pipeline": None, or {"planned", "measured"}: for each position spans [kind, stage, micro-batch, start, end].
- "plan": for each group of ranks with equal shards "ranks", "parameters" and "notes", as `report_table.Report.to_dict`.
- "warnings": sentences that say what to do.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from weft.strategy.durable import publish, temporary_name
from weft.strategy.reports.charts import num_bytes
from weft.strategy.reports.page import idle_fraction, page

DATA_FILE, PAGE_FILE = "weft_report.json", "weft_report.html"
_VERSION = 1
_KEYS = {"version", "run", "points", "ranks", "memory", "pipeline", "plan", "warnings"}
_MOST_WAITING = 0.3  # of a step's time, above which a warning names it
_MOST_IDLE = 0.3  # of a pipeline's time
_PREDICTION_BOUND = 1.02
_EXCHANGES_BYTES = 4 << 20  # staging of callbacks and of the Trainer's checks, which no prediction contains


def write(directory: Path, data: dict[str, Any]) -> Path:
    """Write the data, with its version and its warnings, and the page into `directory`; return the page's path."""
    data = {"version": _VERSION, **data}
    data["warnings"] = [*data.get("warnings", ()), *_warnings(data)]
    directory.mkdir(parents=True, exist_ok=True)
    _replace(directory / DATA_FILE, json.dumps(data))
    return write_page(directory, data)


def write_page(directory: Path, data: dict[str, Any], path: Path | None = None) -> Path:
    """Write the page of data to `path`, by default in `directory`, and return the path."""
    target = directory / PAGE_FILE if path is None else path
    _replace(target, page(data))
    return target


def read(directory: Path) -> dict[str, Any]:
    """Return the data in a directory.

    Raises:
        FileNotFoundError: the directory has none.
        ValueError: the file is not such data, or of another version.
    """
    path = directory / DATA_FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"{str(directory)!r} has no {DATA_FILE}; pass the directory of a run with the callback Report."
        )
    try:
        data = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is no report ({error}); run the training again.") from None
    if not isinstance(data, dict) or _KEYS - data.keys() or data["version"] != _VERSION:
        raise ValueError(f"{str(path)!r} is no report of version {_VERSION}; run the training again.")
    return data


def _replace(path: Path, text: str) -> None:
    temporary = temporary_name(path)
    temporary.write_text(text, encoding="utf-8")
    publish(temporary, path)


def _warnings(data: dict[str, Any]) -> list[str]:
    texts = []
    predicted = data["memory"]["predicted"]
    for each in data["ranks"]:
        peak = sum(each["memory"]["peak"].values())
        if predicted is not None and peak > _PREDICTION_BOUND * predicted + _EXCHANGES_BYTES:
            texts.append(
                f"Rank {each['rank']} used {num_bytes(peak)}, more than the {num_bytes(predicted)} predicted: compare "
                "the categories below with those of weft estimate."
            )
    waits = [
        each["times"]["wait"] / sum(each["times"].values())
        for each in data["ranks"]
        if each["times"]["wait"] is not None and sum(each["times"].values()) > 0
    ]
    if waits and min(waits) > _MOST_WAITING:
        texts.append(
            f"Every rank waits in communication for at least {min(waits):.0%} of a step: try larger batches, fewer "
            "tensor-parallel ranks, or a layout that weft tune finds."
        )
    if data["pipeline"] is not None:
        idle = idle_fraction(data["pipeline"]["measured"])
        if idle > _MOST_IDLE:
            texts.append(
                f"The ranks of the pipeline are idle for {idle:.0%} of a step: use more micro-batches, or a schedule "
                "such as 'zero_bubble' or 'zbv'."
            )
    return texts
