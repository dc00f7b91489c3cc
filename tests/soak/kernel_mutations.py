"""Plants faults in the CUDA kernels, one at a time, and checks that a test on the emulator finds each of them.

    PYTHONPATH=tests python tests/soak/kernel_mutations.py [--only NAME ...] [--jobs 2] [--json]

The faults are listed in tests/soak/mutations. Each is planted in a copy of kernels/; only the launch files that include
the mutated file are compiled, and the tests of these kernels run in ctest's thread orders up to the first failure.
Prints a line for each mutation: found, with the order, the test and the sanitizer's error, or survived, with a reason.
Needs an up-to-date build in build/dev.

Exits with 1 if a mutation survives without a listed reason, if one with a reason is found, if one does not compile, if
the tests fail without a mutation, or if less than 95 % of the mutations that are not equivalent are found.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from soak.mutations import cross_entropy, elementwise, norm, optimizer, shared
from soak.mutations.emulated_build import ROOT, SUITES, BuildError, EmulatedBuild, launch_files_with
from soak.mutations.mutation import Mutation

MUTATIONS = [*shared.MUTATIONS, *elementwise.MUTATIONS, *cross_entropy.MUTATIONS, *norm.MUTATIONS, *optimizer.MUTATIONS]
MIN_FOUND = 0.95  # of the mutations that are not equivalent


@dataclass
class Outcome:
    """The result of one mutation."""

    name: str
    result: str  # found, survived or error
    detail: str  # how it was found, the listed reason, or the error
    seconds: float
    is_expected: bool


def check(build: EmulatedBuild, mutation: Mutation) -> Outcome:
    """Plant one mutation and run the tests of the kernels that contain it."""
    started = time.monotonic()
    found, error = "", ""
    with tempfile.TemporaryDirectory(prefix="weft-mutation-") as folder:
        try:
            for launch in launch_files_with(mutation.file):
                executable = build.executable(launch, mutation, Path(folder))
                found = found or build.failure(executable, launch, mutation.cases)
                if found:
                    break
        except (BuildError, ValueError) as failure:
            error = str(failure)
    seconds = time.monotonic() - started
    if error:
        return Outcome(mutation.name, "error", error, seconds, is_expected=False)
    if found:
        return Outcome(mutation.name, "found", found, seconds, is_expected=not mutation.reason)
    return Outcome(mutation.name, "survived", mutation.reason, seconds, is_expected=bool(mutation.reason))


def baseline_problems(build: EmulatedBuild, launches: Iterable[str]) -> list[str]:
    """Return how the tests fail on unchanged kernels, in which case results of mutations would mean nothing."""
    problems = []
    for launch in launches:
        with tempfile.TemporaryDirectory(prefix="weft-mutation-") as folder:
            failure = build.failure(build.executable(launch, None, Path(folder)), launch)
        if failure:
            problems.append(f"the tests of {launch} fail without a mutation: {failure}")
    return problems


def problems_of(outcomes: list[Outcome], mutations: list[Mutation]) -> list[str]:
    """Return why a run fails."""
    words = {
        "found": "is listed as one that the tests do not find, and is found",
        "survived": "survived without a listed reason",
        "error": "cannot be tested",
    }
    problems = [
        f"{outcome.name} {words[outcome.result]}" + (f": {outcome.detail}" if outcome.detail else "")
        for outcome in outcomes
        if not outcome.is_expected
    ]
    share = share_found(outcomes, mutations)
    if share < MIN_FOUND:
        problems.append(
            f"{100 * share:.1f} % of the mutations that are not equivalent were found, wanted {100 * MIN_FOUND:.0f} %"
        )
    return problems


def share_found(outcomes: list[Outcome], mutations: list[Mutation]) -> float:
    """Return which share of the mutations that are not equivalent was found; 1 if there are none."""
    visible = {mutation.name for mutation in mutations if not mutation.equivalent}
    found = [outcome.result == "found" for outcome in outcomes if outcome.name in visible]
    return sum(found) / len(found) if found else 1.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="names of mutations; default: all")
    parser.add_argument("--jobs", type=int, default=1, help="mutations at a time; each needs 1 GB of memory")
    parser.add_argument("--json", action="store_true", help="print JSON lines instead of a table")
    options = parser.parse_args()
    unknown = set(options.only) - {mutation.name for mutation in MUTATIONS}
    if unknown:
        parser.error(f"--only got {', '.join(sorted(unknown))}, which tests/soak/mutations does not list")
    mutations = [mutation for mutation in MUTATIONS if not options.only or mutation.name in options.only]
    for mutation in mutations:
        mutation.apply((ROOT / "kernels" / mutation.file).read_text())  # fails before anything is compiled
    started = time.monotonic()
    build = EmulatedBuild(ROOT / "build" / "dev")
    launches = [launch for launch in SUITES if any(launch in launch_files_with(each.file) for each in mutations)]
    problems = baseline_problems(build, launches)
    outcomes = []
    if not problems:
        with ThreadPoolExecutor(options.jobs) as pool:
            for outcome in pool.map(lambda mutation: check(build, mutation), mutations):
                outcomes.append(outcome)
                line = f"{outcome.name:<36} {outcome.result:<9} {outcome.seconds:5.0f} s  {outcome.detail}"
                print(json.dumps(asdict(outcome)) if options.json else line, flush=True)
        problems = problems_of(outcomes, mutations)
    summary = {
        "mutations": len(mutations),
        "found": sum(outcome.result == "found" for outcome in outcomes),
        "equivalent": sum(bool(mutation.equivalent) for mutation in mutations),
        "unseen": sum(bool(mutation.unseen) for mutation in mutations),
        "percent_found": round(100 * share_found(outcomes, mutations), 1),
        "seconds": round(time.monotonic() - started),
    }
    print(json.dumps(summary) if options.json else ", ".join(f"{name} {value}" for name, value in summary.items()))
    print("\n".join(problems) or "no problems", file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
