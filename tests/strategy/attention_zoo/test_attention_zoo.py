"""plan="auto" on many ways to write attention: the sharded model computes the same as the unsharded one."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable

import pytest
from strategy.attention_zoo import (
    cases_einops,
    cases_grouped,
    cases_head_counts,
    cases_memory,
    cases_norms,
    cases_positions,
    cases_projections,
    cases_scores,
)
from strategy.attention_zoo.comparison import Outcome, compare, is_clear_error, worst
from strategy.attention_zoo.zoo import Case, Sharding

import weft
from support.parity import tensor_parallel
from support.ranks import run_on_ranks
from weft.strategy import Plan

FILES = (
    cases_head_counts,
    cases_projections,
    cases_grouped,
    cases_positions,
    cases_scores,
    cases_norms,
    cases_memory,
    cases_einops,
)
CASES: dict[str, Case] = {case.name: case for file in FILES for case in file.cases.all}


def compare_all(world_size: int, names: list[str], verified: bool) -> list[Outcome]:
    """Return the outcomes of the named cases on this rank. Print each name first, to show where a rank hangs."""
    mesh = tensor_parallel(world_size)
    outcomes = []
    for name in names:
        print(name, flush=True)
        outcomes.append(compare(CASES[name], mesh, "auto" if verified else Plan("auto", verify="never")))
    return outcomes


def on_all_ranks(world_size: int, cases: Iterable[Case], verified: bool = True) -> list[Outcome]:
    """Return the worst outcome among the ranks for each case that runs on `world_size` ranks."""
    names = [case.name for case in cases if world_size in case.world_sizes]
    ranks = run_on_ranks(world_size, compare_all, timeout=280, names=names, verified=verified)
    return [worst(outcomes_of_case) for outcomes_of_case in zip(*ranks, strict=True)]


@functools.cache
def outcomes(world_size: int) -> list[Outcome]:
    return on_all_ranks(world_size, CASES.values())


@pytest.mark.parametrize("world_size", [2, 3, pytest.param(4, marks=pytest.mark.extended)])
def test_attention_matches_unsharded_or_raises_clear_error(world_size: int) -> None:
    found = outcomes(world_size)
    failures = [str(outcome) for outcome in found if outcome.result not in ("equal", "unsupported")]
    assert not failures, f"{len(failures)} of {len(found)} on {world_size} ranks:\n" + "\n".join(failures)


@pytest.mark.parametrize("world_size", [2])
def test_attention_weights_are_sharded(world_size: int) -> None:
    found = outcomes(world_size)
    allowed = {
        Sharding.ANY: set(Sharding) | {None},
        Sharding.SHARDS: {Sharding.SHARDS, Sharding.HEADS},
        Sharding.HEADS: {Sharding.HEADS},
    }
    failures = [
        f"{outcome.name}: expected {CASES[outcome.name].min_sharding.value}, found {outcome.result}, {outcome.sharding}"
        for outcome in found
        if outcome.sharding not in allowed[CASES[outcome.name].min_sharding]
    ]
    assert not failures, "\n".join(failures)
    assert sum(outcome.result == "equal" and outcome.sharding in allowed[Sharding.SHARDS] for outcome in found) >= 30


@pytest.mark.parametrize("world_size", [2])
def test_zoo_detects_wrong_shards_without_verification(world_size: int) -> None:
    """Uses the cases of one file, to save time."""
    counts = Counter(
        outcome.result for outcome in on_all_ranks(world_size, cases_head_counts.cases.all, verified=False)
    )
    assert counts["wrong"] + counts["error"] >= 8, counts


def test_cases_have_unique_names() -> None:
    assert len(CASES) == sum(len(file.cases.all) for file in FILES) >= 40


def error_of(function: object, *arguments: object) -> Exception:
    with pytest.raises(Exception) as caught:
        function(*arguments)
    return caught.value


def test_clear_errors_are_of_weft_and_name_a_module() -> None:
    def raise_outside_weft() -> None:
        raise ValueError("'blocks.0.attn' is no attention")

    weft_error = error_of(Plan, "'blocks.0.attn'")  # Plan quotes a string that it cannot parse
    assert "'blocks.0.attn'" in str(weft_error)
    assert is_clear_error(weft_error, ["blocks.0.attn"])
    assert not is_clear_error(weft_error, ["blocks.1.attn"])
    assert not is_clear_error(error_of(raise_outside_weft), ["blocks.0.attn"])
    assert not is_clear_error(error_of(weft.strategy.report, None), ["blocks.0.attn"])
