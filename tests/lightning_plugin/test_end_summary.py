"""The line that a strategy logs when a training ends."""

from __future__ import annotations

import itertools
import re
import time
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from lightning_plugin.scripts.plugin_models import Model, loader, set_torchrun_environment, trainer

from support.ranks import on_ranks
from weft._plugin.end_summary import EndSummary
from weft._plugin.throughput_monitor import first_dim
from weft.lightning import MemoryMonitor, WeftModelParallelStrategy


@on_ranks(2)
def test_line_has_speed_and_peak(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    for layout, num_data, counts_memory in (("tp2", 1, False), ("dp2", 2, True)):
        lines: ClassVar[list[str]] = []
        strategy = WeftModelParallelStrategy(plan="auto", layout=layout)
        strategy._engine.console.log = lines.append  # type: ignore[method-assign]
        callbacks = [MemoryMonitor()] if counts_memory else []
        run = trainer(world_size, strategy, tmp_path, callbacks=callbacks)
        batches = loader()
        run.fit(Model(), batches)
        [line] = [text for text in lines if text.startswith("weft: trained ")]
        pattern = r"weft: trained (\d+) batches, the median in (\S+) s: (\S+) rows/s of all ranks(; at most .*)?\."
        match = re.fullmatch(pattern, line)
        assert match is not None, line
        rows = first_dim(next(iter(batches)))
        speed = float(match[3].replace(",", ""))
        assert abs(speed * float(match[2]) / (num_data * rows) - 1) < 0.02, line
        assert (match[4] is not None) == counts_memory or layout == "tp2"
        if counts_memory:
            peak = max(row["total"] for row in callbacks[0].table())
            found = re.search(r"at most ([\d,.]+) MB at the peak, on rank \d", line)
            assert found is not None and float(found[1].replace(",", "")) * 1e6 <= 1.01 * peak


class _Engine:
    """The attributes of an engine that the summary reads."""

    class data_axes:
        size = 1

    class console:
        lines: ClassVar[list[str]] = []
        log = lines.append

    device = torch.device("cpu")


@on_ranks(1)
def test_accumulated_batches_count_by_steps(rank: int, world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second batch ends a step, which takes longer."""
    monkeypatch.setattr(_Engine.console, "lines", lines := [])
    monkeypatch.setattr(_Engine.console, "log", lines.append)
    now = itertools.accumulate(itertools.chain([0.0], itertools.cycle([1.0, 3.0])))
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    summary = EndSummary(_Engine())  # type: ignore[arg-type]
    summary.begin(2)
    for _ in range(8):
        summary.batch_begins(torch.zeros(4, 2))
    summary.log()
    [line] = lines
    assert line.startswith("weft: trained 8 batches, the median in 2 s: 2 rows/s of all ranks")


@on_ranks(1)
def test_tokens_are_counted_for_ids(rank: int, world_size: int) -> None:
    summary = EndSummary(_Engine())  # type: ignore[arg-type]
    summary.log()
    assert not _Engine.console.lines  # nothing was trained
    for batch in (torch.zeros(2, 8, dtype=torch.int64), torch.zeros(2, 8), {}):
        summary.begin()
        summary.batch_begins(batch)
        summary.log()
        summary.batch_begins(batch)
        summary.log()
    assert [("rows/s" in line, "tokens/s" in line) for line in _Engine.console.lines] == [
        (True, True),
        (True, False),
        (False, False),
    ]
