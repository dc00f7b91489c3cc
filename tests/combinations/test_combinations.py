"""Runs a part of the combinations of docs/combinations.md: those that were hard to make work, and a sample."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from combinations.options import LAYOUTS, Combination, combinations
from combinations.page import PAGE, page, reason_of, written
from combinations.runs import LOW_TOLERANCE, TOLERANCE, Outcome, run

# The sample is the same in each run, so that a failure repeats.
SAMPLE_SIZE, SEED = 4, 1
CHOSEN = [
    Combination("pp2,tp2", ("sequence_parallel=True", "optimizer_in_backward=True")),
    Combination("pp2,tp2", ('pipeline_schedule="zero_bubble"', 'activation_checkpointing="full"')),
    Combination("pp2", ("optimizer_in_backward=True", "clipping by norm")),
    Combination("pp2", ("optimizer_in_backward=True", 'optimizer_state="int8"')),
    Combination("pp2", ('precision="bf16-true"',)),
    Combination("dp2", ("optimizer_in_backward=True", "clipping by norm")),
    Combination("dp2,tp2", ('precision="16-mixed"', "clipping by norm")),
    Combination("dp2,tp2", ("optimizer_in_backward=True", "accumulate_grad_batches=2")),
    Combination("tp2", ('optimizer_in_backward="rows"', "clipping by norm")),
]

TRIPLES = [
    Combination("tp2", ("optimizer_in_backward=True", 'activation_checkpointing="selective"', "clipping by norm")),
    Combination("dp2,tp2", ("optimizer_in_backward=True", 'activation_checkpointing="full"', "clipping by norm")),
    Combination(
        "pp2,tp2", ("sequence_parallel=True", 'pipeline_schedule="zero_bubble"', 'activation_checkpointing="full"')
    ),
    Combination(
        "pp2,tp2", ("sequence_parallel=True", 'activation_checkpointing="full"', 'compile={"backend": "aot_eager"}')
    ),
]


def _sample(layout: str) -> list[Combination]:
    every = list(combinations(layout))
    return random.Random(SEED).sample(every, SAMPLE_SIZE)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_combinations_are_as_the_page_says(layout: str, tmp_path: Path) -> None:
    expected = written(PAGE.read_text())
    chosen = [combination for combination in CHOSEN if combination.layout == layout]
    for combination in dict.fromkeys([*chosen, *_sample(layout)]):
        outcome = run(combination, str(tmp_path))
        assert outcome.is_allowed, f"{combination}: weights differ by {outcome.difference:.1e}"
        assert reason_of(outcome.error) == expected[combination], "run `python docs/generate_combinations.py`"


# On a layout that the page does not have: FSDP2 computes in bfloat16 inside of stages.
SHARDED_STAGES = [
    Combination("pp2,dp2", ('precision="bf16-mixed"',)),
    Combination("pp2,dp2", ("optimizer_in_backward=True", 'master_weights="split"')),
]


# Stages that exchange shards of sequences.
SHARDED_SEQUENCES = [
    Combination("pp2,cp2", ("zero_stage=0",)),
    Combination("pp2,cp2", ('context_attention="ulysses"', "clipping by norm")),
    Combination("pp2,cp2", ('pipeline_schedule="zero_bubble"', 'activation_checkpointing="full"')),
    Combination("pp2,cp2", ('pipeline_schedule="interleaved"', 'activation_checkpointing="selective"')),
    Combination("pp2,cp2", ("zero_stage=1", 'precision="bf16-mixed"')),
    Combination("pp2,cp2", ("optimizer_in_backward=True", "accumulate_grad_batches=2")),
]


@pytest.mark.parametrize(
    "combination", [*TRIPLES, *SHARDED_STAGES, *SHARDED_SEQUENCES], ids=lambda each: f"{each.layout} {len(each.names)}"
)
def test_more_combinations_work(combination: Combination, tmp_path: Path) -> None:
    outcome = run(combination, str(tmp_path))
    assert outcome.is_equal, outcome


def test_page_is_read_as_written() -> None:
    every = [combination for layout in LAYOUTS for combination in combinations(layout)]
    errors = {combination: f"error {idx}" for idx, combination in enumerate(every[::7])}
    outcomes = [Outcome(combination, errors.get(combination, "")) for combination in every]
    assert written(page(PAGE.read_text(), outcomes)) == {each: errors.get(each, "") for each in every}


def test_chosen_combinations_work() -> None:
    expected = written(PAGE.read_text())
    assert {combination: expected[combination] for combination in CHOSEN} == dict.fromkeys(CHOSEN, "")


def test_differences_are_detected() -> None:
    low = Combination("pp2", ('precision="bf16-true"',))
    other = Combination("pp2", ("clipping by norm",))
    assert Outcome(low, difference=LOW_TOLERANCE).is_equal and not Outcome(low, difference=0.5).is_equal
    assert Outcome(other, difference=TOLERANCE).is_equal and not Outcome(other, difference=0.01).is_equal
    assert not Outcome(other, difference=float("nan")).is_equal
