"""Kept results of searches: for which changes of a training they are found again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from strategy.test_tune_module import HEADS, OPTIONS, PLAN, RATES, Blocks, PlayedProcess
from torch import Tensor, nn

from weft.strategy.dry_run.process import DryRunProcess
from weft.strategy.dry_run.request import Request
from weft.strategy.tuning import Tuning, tune_module
from weft.strategy.tuning.result_cache import ResultCache


class OtherBlocks(Blocks):
    """Computes with the same parameters in another way."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def _no_styles(name: str, module: nn.Module) -> None:
    """A plan that is a function, and shards nothing."""


def test_results_are_found_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("weft.strategy.tuning.modules.DryRunProcess", PlayedProcess)
    monkeypatch.setattr(PlayedProcess, "num_runs", 0)
    monkeypatch.setattr(PlayedProcess, "weight_bytes", 1000)
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path))

    def search(digest: str = "a", **options: Any) -> tuple[Tuning, int, bool]:
        """Return the result, the number of dry runs, and whether the cache has had it."""
        monkeypatch.setattr(PlayedProcess, "digest", digest)
        before, cache = PlayedProcess.num_runs, ResultCache.of_environment()
        assert cache is not None
        arguments = {"cluster": RATES, "plan": PLAN, "fixed": "tp=1", **options}
        found = tune_module(Blocks, 4, cache=cache, **arguments)
        return found, PlayedProcess.num_runs - before, cache.path_of_hit is not None

    path = tmp_path / "plan.json"
    path.write_text(json.dumps(PLAN))
    assert not search(plan=path)[2] and search(plan=path)[2]
    path.write_text(json.dumps(HEADS))
    assert not search(plan=path)[2] and search(plan=path)[2]
    assert search(plan=_no_styles)[2] is search(plan=_no_styles)[2] is False  # its rules are not known
    path.unlink()
    for each in tmp_path.glob("layouts/*"):
        each.unlink()
    first, num_runs, _ = search()
    assert num_runs > 2 and search() == (first, 1, True)
    others = [
        {"digest": "b"},
        {"memory": "1GB"},
        {"fixed": "tp=2"},
        {"cluster": {**RATES, "devices_per_host": 3}},
        {"precision": "bf16-mixed"},
        {"plan": HEADS},
        {"global_rows": 32},
    ]
    assert not any(search(**each)[2] for each in others) and all(search(**each)[2] for each in others)
    [path] = (path for path in tmp_path.glob("layouts/*") if json.loads(path.read_text())["memory_limit"] == 10**9)
    path.write_text("{")
    assert not search(memory="1GB")[2] and search(memory="1GB")[2]
    assert len(list(tmp_path.glob("layouts/*"))) == len(others) + 1
    nothing, _, _ = search(memory=1)
    assert not nothing.layouts and search(memory=1) == (nothing, 1, True)
    monkeypatch.setenv("WEFT_CACHE_DIR", "")
    assert ResultCache.of_environment() is None


def _adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.5)


def test_digests_differ_where_modules_do() -> None:
    with DryRunProcess() as process:

        def digest(module: Any = Blocks, **options: Any) -> str:
            request = Request(module, **{**OPTIONS, "num_steps": 1, "is_traced": True, **options})
            return process.run(request)[0].digest

        assert digest(optimizer=_adam) == digest(optimizer="AdamW")  # with other learning rates
        same = digest()
        assert len(same) == 64 and digest() == same
        different = [digest(OtherBlocks), digest(num_rows=3), digest(optimizer="SGD")]
        assert len({same, *different}) == 4
        assert process.run(Request(Blocks, **OPTIONS, num_steps=1))[0].digest == ""
