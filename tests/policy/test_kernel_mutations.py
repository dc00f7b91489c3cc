"""The mutations of tests/soak/kernel_mutations.py match the kernels' sources; nothing is compiled here."""

from __future__ import annotations

import pytest
from soak.kernel_mutations import MUTATIONS, Outcome, problems_of
from soak.mutations.emulated_build import ROOT, SUITES, launch_files_with
from soak.mutations.mutation import Mutation

MIN_MUTATIONS = 40


def test_every_mutation_changes_the_sources() -> None:
    names = [mutation.name for mutation in MUTATIONS]
    assert len(names) == len(set(names)) >= MIN_MUTATIONS
    for mutation in MUTATIONS:
        source = (ROOT / "kernels" / mutation.file).read_text()
        assert mutation.apply(source) != source, mutation.name
        assert launch_files_with(mutation.file), f"{mutation.name}: the emulator does not compile {mutation.file}"
        assert not (mutation.equivalent and mutation.unseen), mutation.name


def test_launch_files_that_include_a_header_are_found() -> None:
    assert launch_files_with("src/philox.h") == ["cuda/dropout_launch.cu"]
    reducing = ["cuda/optimizer_step_launch.cu", "cuda/cross_entropy_launch.cu", "cuda/norm_launch.cu"]
    assert launch_files_with("cuda/block_reduce.cuh") == reducing
    assert launch_files_with("cuda/vector_access.cuh") == list(SUITES)
    assert sorted(SUITES) == sorted(f"cuda/{path.name}" for path in (ROOT / "kernels" / "cuda").glob("*.cu"))


def test_mutation_replaces_one_occurrence() -> None:
    assert Mutation("m", "f", "ab", "x", which=2, times=3).apply("ab ab ab") == "ab x ab"
    with pytest.raises(ValueError, match=r"mutation m got 2 occurrences of its text in kernels/f and expects 3; corr"):
        Mutation("m", "f", "ab", "x", times=3).apply("ab ab")


def test_unexpected_results_of_a_run_are_problems() -> None:
    equivalent = Mutation("e", "f", "a", "b", equivalent="only the speed differs")
    listed = [Mutation("m", "f", "a", "b"), equivalent]

    def outcome(name: str, result: str, *, is_expected: bool) -> Outcome:
        return Outcome(name, result, "", 1.0, is_expected)

    good = [outcome("m", "found", is_expected=True), outcome("e", "survived", is_expected=True)]
    assert problems_of(good, listed) == []
    stale = [good[0], outcome("e", "found", is_expected=False)]
    assert problems_of(stale, listed) == ["e is listed as one that the tests do not find, and is found"]
    survived = [outcome("m", "survived", is_expected=False), good[1]]
    assert problems_of(survived, listed) == [
        "m survived without a listed reason",
        "0.0 % of the mutations that are not equivalent were found, wanted 95 %",
    ]
