"""Finds the largest batch that fits into the memory of a device, by dry runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from weft.strategy.dry_run.process import DryRunProcess, ProcessEndedError
from weft.strategy.dry_run.request import Request
from weft.strategy.tuning.request import read_bytes


@dataclasses.dataclass(frozen=True)
class FoundBatch:
    """The largest batch that fits.

    Attributes:
        num_rows: of the batch of a data-parallel rank; 0: none fits.
        peak_bytes: of the rank with the most, with this batch; if none fits, with the smallest that is possible.
        num_dry_runs: that the search has needed.
        error: the last line of the first error with more rows than in the given batch; "": there was none.
    """

    num_rows: int
    peak_bytes: int
    num_dry_runs: int
    error: str = ""


def largest_batch(
    module: Any,
    memory: str | int,
    *,
    given_rows: int | None = None,
    max_rows: int,
    num_waiting_batches: int = 0,
    **options: Any,
) -> FoundBatch:
    """Return the largest batch with which training fits into `memory`.

    A script must call this function under `if __name__ == "__main__"`.

    Args:
        module, options: those of `weft.strategy.dry_run.estimate_module`. The rows of a batch are repeated, or left
            out.
        memory: the most bytes of a device, such as "72GB".
        given_rows: the rows that the batch must have (the first dim of its tensors); None: any number.
        max_rows: the most rows that are tried.
        num_waiting_batches: that the device holds while it trains another one; `peak_bytes` contains them.

    Raises:
        ValueError: an argument is not valid, or the batch has other rows than `given_rows`.
        RuntimeError: the module raised an error with the batch as it is.
    """
    limit = read_bytes(memory)
    if max_rows < 1:
        raise ValueError(f"tune: got max_rows = {max_rows}; give a number from 1.")
    request = Request(module, **options)
    with DryRunProcess() as process:

        def peak_of(num_rows: int | None) -> tuple[int, int]:
            predictions = process.run(dataclasses.replace(request, num_rows=num_rows))
            peak = max(sum(usage.values()) for each in predictions for usage in each.phases.values())
            return predictions[0].num_rows, peak + num_waiting_batches * predictions[0].batch_bytes

        num_rows, peak = peak_of(None)
        if given_rows is not None and num_rows != given_rows:
            raise ValueError(
                f"tune: got a batch with {num_rows} rows for a batch size of {given_rows}; give a loader whose batches "
                "have a row for each sample."
            )

        first_error = ""

        def try_peak_of(rows: int) -> int | None:
            nonlocal first_error
            try:
                return peak_of(rows)[1]
            except ProcessEndedError:
                raise
            except (ValueError, RuntimeError) as error:  # such as fewer rows than micro-batches
                if rows > num_rows and not first_error:
                    first_error = f"{rows} rows: {str(error).strip().splitlines()[-1]}"
                return None

        found = search_rows(try_peak_of, limit, (num_rows, peak), max_rows)
        return dataclasses.replace(found, error=first_error)


def search_rows(peak_of: Callable[[int], int | None], limit: int, first: tuple[int, int], max_rows: int) -> FoundBatch:
    """Return the largest number of rows, up to `max_rows`, whose peak is at most `limit`.

    Peaks are almost linear in the rows. So the line through the nearest two known peaks proposes the next number, and
    the middle of the interval every third time, which bounds the calls by three times those of a bisection.

    Args:
        peak_of: returns bytes, which grow with the rows; None: fewer rows than those of `first` are not possible, or so
            many rows are not.
        first: rows with a known peak.
    """
    known: dict[int, int] = {}
    fitting, too_many = 0, max_rows + 1
    smallest = first
    num_calls = 0

    def add(rows: int, peak: int | None) -> None:
        nonlocal fitting, too_many, smallest
        if peak is None:
            fitting, too_many = (max(fitting, rows), too_many) if rows < first[0] else (fitting, rows)
            return
        known[rows] = peak
        smallest = min(smallest, (rows, peak))
        if peak > limit:
            too_many = min(too_many, rows)
        elif rows <= max_rows:
            fitting = max(fitting, rows)

    add(*first)
    while too_many - fitting > 1:
        proposed = _proposed(known, limit, fitting, too_many) if num_calls % 3 < 2 else (fitting + too_many) // 2
        num_calls += 1
        add(proposed, peak_of(proposed))
    if fitting in known:
        return FoundBatch(fitting, known[fitting], num_calls + 1)
    return FoundBatch(0, smallest[1], num_calls + 1)


def _proposed(known: dict[int, int], limit: int, fitting: int, too_many: int) -> int:
    """Return the next number of rows between both ends, from the line through the two peaks nearest to the limit."""
    nearest = sorted(known.items(), key=lambda item: abs(item[1] - limit))[:2]
    if len(nearest) == 1:
        [(rows, peak)] = nearest
        proposed = 2 * rows if peak <= limit else rows // 2
    else:
        (rows, peak), (other_rows, other_peak) = nearest
        slope = (other_peak - peak) / (other_rows - rows)
        proposed = fitting + 1 if slope <= 0 else rows + int((limit - peak) // slope)
        if proposed == fitting:
            proposed += 1  # the line says that no more rows fit
    return min(max(proposed, fitting + 1), too_many - 1)
