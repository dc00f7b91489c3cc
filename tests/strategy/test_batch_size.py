"""The search for the largest batch: against trying all numbers of rows, and with dry runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from strategy.test_tune_module import OPTIONS, Blocks

from weft.strategy.dry_run.entry import estimate_module
from weft.strategy.tuning.batch_size import largest_batch, search_rows

PEAKS: dict[str, Callable[[int], int]] = {
    "linear": lambda rows: 1000 + 37 * rows,
    "no constant part": lambda rows: 5 * rows,
    "constant at first": lambda rows: max(2000, 100 * rows),
    "in jumps": lambda rows: 500 + 64 * math.ceil(rows / 8) + rows,
    "quadratic": lambda rows: 100 + rows * rows,
}


@pytest.mark.parametrize("first_rows", [1, 4, 23])
@pytest.mark.parametrize("peak_of", PEAKS.values(), ids=PEAKS.keys())
def test_search_finds_what_trying_all_finds(peak_of: Callable[[int], int], first_rows: int) -> None:
    max_rows = 40
    peaks = [peak_of(rows) for rows in range(1, max_rows + 1)]
    for limit in {peak + change for peak in peaks for change in (-1, 0, 1)}:
        calls: list[int] = []

        def counted(rows: int, calls: list[int] = calls) -> int:
            assert 1 <= rows <= max_rows and rows not in calls
            calls.append(rows)
            return peak_of(rows)

        found = search_rows(counted, limit, (first_rows, peak_of(first_rows)), max_rows)
        most = sum(peak <= limit for peak in peaks)
        expected = (most, peak_of(most)) if most else (0, peak_of(1))
        assert (found.num_rows, found.peak_bytes) == expected, limit
        assert found.num_dry_runs == len(calls) + 1 <= 3 * math.ceil(math.log2(max_rows)) + 1


def test_few_calls_for_linear_peaks() -> None:
    found = search_rows(lambda rows: 10**9 + 12_345_678 * rows, 72 * 10**9, (4, 10**9 + 12_345_678 * 4), 8192)
    assert found.num_rows == (72 * 10**9 - 10**9) // 12_345_678 and found.num_dry_runs <= 5


def test_rows_that_are_not_possible_are_left_out() -> None:
    """A batch needs a row for each of four micro-batches, and more than 50 raise an error."""

    def peak_of(rows: int) -> int | None:
        return 100 * rows if 4 <= rows <= 50 else None

    assert search_rows(peak_of, 650, (16, 1600), 100).num_rows == 6
    nothing = search_rows(peak_of, 399, (16, 1600), 100)
    assert (nothing.num_rows, nothing.peak_bytes) == (0, 400)
    assert search_rows(peak_of, 10**6, (16, 1600), 12).num_rows == 12  # fewer than the batch has
    assert search_rows(peak_of, 10**6, (16, 1600), 100).num_rows == 50


def test_dry_runs_decide() -> None:
    def peak_of(num_rows: int) -> int:
        return estimate_module(Blocks, "dp2", num_rows=num_rows, **OPTIONS).peak_bytes

    limit = peak_of(9) + 1
    found = largest_batch(Blocks, limit, max_rows=64, layout="dp2", **OPTIONS)
    assert (found.num_rows, found.peak_bytes) == (9, limit - 1) and peak_of(10) > limit
    for arguments, message in (
        ({"given_rows": 3}, "tune: got a batch with 2 rows for a batch size of 3"),
        ({"max_rows": 0}, "tune: got max_rows = 0"),
        ({"layout": "dp"}, "layout"),
    ):
        options: dict[str, Any] = {"max_rows": 64, "layout": "dp2", **OPTIONS, **arguments}
        with pytest.raises(ValueError, match=message):
            largest_batch(Blocks, limit, **options)
