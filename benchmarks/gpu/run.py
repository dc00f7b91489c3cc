"""Runs the parts one after another within a total time; every part is reported, whatever happens to the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu.machine import Machine
from gpu.parts import ROOT, Part
from gpu.processes import run_limited
from gpu.results import Results, bounded

PASSED, FAILED, TIMED_OUT, SKIPPED, PENDING = "passed", "failed", "timed out", "skipped", "not run"
_RESERVE_SECONDS = 5.0  # reserved for reading and writing results
_LEAST_SECONDS = 1.0  # a part with less is not started


def limit_of(index: int, parts: Sequence[Part], remaining: float, scale: float) -> float:
    """Return the seconds that a part may take.

    The shares of later parts are reserved for them. Time that earlier parts left unused is given to the next part, up
    to its `most_seconds`.
    """
    later = scale * sum(part.share_seconds for part in parts[index + 1 :])
    return min(scale * parts[index].most_seconds, remaining - later)


class Run:
    """A run of `parts`.

    Args:
        parts: the parts, in the order in which they run.
        machine: the machine's facts, and the requirements that it lacks.
        results: stores and writes the report.
        work: folder for logs and for the parts' own files.
        total_seconds: the limit of all parts together.
        scale: factor for the parts' shares and limits, which are set for a total time of TOTAL_SECONDS.
        environment: the environment of every part.
        measured_environment: additional variables of the parts other than "build".
        has_package: returns whether weft is built or installed; parts that need weft are skipped if it is not.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        machine: Machine,
        results: Results,
        work: Path,
        *,
        total_seconds: float,
        scale: float,
        environment: Mapping[str, str],
        measured_environment: Mapping[str, str],
        has_package: Callable[[], bool],
    ) -> None:
        self._parts, self._machine, self._results, self._work = parts, machine, results, work
        self._deadline = time.monotonic() + total_seconds - _RESERVE_SECONDS
        self._scale, self._has_package = scale, has_package
        self._environment, self._measured_environment = environment, measured_environment
        self._rows: list[dict[str, Any]] = [
            {"name": part.name, "title": part.title, "status": PENDING, "seconds": 0.0} for part in parts
        ]
        results.report["parts"] = self._rows
        results.save()

    def run(self) -> bool:
        """Run all parts; return whether every part passed."""
        for index, part in enumerate(self._parts):
            row = self._rows[index]
            try:
                self._run_part(index, part, row)
            except Exception as error:  # the error of one part must not stop later ones
                row.update(status=FAILED, reason=f"{type(error).__name__}: {error}")
            except BaseException:
                row.update(status=FAILED, reason="The run was interrupted.")
                raise
            finally:
                self._results.save()
            print(f"{part.name:<10} {row['status']:<10} {row['seconds']:6.1f} s  {row.get('reason', '')}", flush=True)
        return all(row["status"] == PASSED for row in self._rows)

    def _run_part(self, index: int, part: Part, row: dict[str, Any]) -> None:
        lacking = [need for need in part.needs if need in self._machine.missing]
        if lacking:
            row.update(status=SKIPPED, reason=f"Missing: {', '.join(lacking)}.")
            return
        if part.needs_build and not self._has_package():
            row.update(status=SKIPPED, reason="weft is not built: see the part build.")
            return
        limit = limit_of(index, self._parts, self._deadline - time.monotonic(), self._scale)
        row["limit_seconds"] = round(limit, 1)
        if limit < _LEAST_SECONDS:
            row.update(status=TIMED_OUT, reason="No time is left: raise WEFT_GPU_SECONDS.")
            return
        environment = {**self._environment, **(self._measured_environment if part.needs_build else {})}
        environment |= {**part.environment, "WEFT_GPU_PART_SECONDS": str(limit)}
        log = self._work / f"{part.name}.log"
        outcome = run_limited(part.command, seconds=limit, log=log, environment=environment, folder=ROOT)
        row.update(seconds=round(outcome.seconds, 1), returncode=outcome.returncode)
        self._results.add_log(part.title, log)
        result = bounded(part.result(self._work)) or {}
        notes = [note for name in part.files if (note := self._results.add_file(self._work / name)) is not None]
        row["result"] = result
        if outcome.timed_out or result.get("timed_out"):
            row.update(status=TIMED_OUT, reason=f"The limit of {limit:.0f} s was reached; the results so far are kept.")
        elif "problem" in result:
            row.update(status=FAILED, reason=result["problem"])
        elif outcome.returncode != 0:
            row.update(status=FAILED, reason=f"It ended with status {outcome.returncode}: see log.txt.")
        else:
            row.update(status=PASSED)
        if notes:
            row["notes"] = notes
