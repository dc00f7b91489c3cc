"""Runs torch's suite DistributedTest with the backends gloo and weft, and compares the outcome of each test.

    python tests/soak/torch_distributed.py [--ranks 3 4] [--only test_name ...] [--json]

The suite is torch/testing/_internal/distributed/distributed_test.py of the installed torch. Tests that gloo skips, most
of which need GPUs, do not count. Exits with 1 if a test that passes with gloo does not pass with weft and has no reason
in EXEMPTED, or if a test of EXEMPTED passes with weft at every number of ranks.

The ranks of a test are forked from a process that has imported torch and the suite: torch's own runner starts an
interpreter for each rank of each test, which takes most of its time.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
import unittest
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

# Tests that compare texts or names of gloo, each with what weft does instead.
EXEMPTED: dict[str, str] = {
    "test_ddp_logging_data_cpu": "name: DDP logs 'custom' for each backend that is not torch's own",
    "test_monitored_barrier_gloo": "text: every rank raises the same error, which lists the late ranks",
    "test_monitored_barrier_gloo_rank_0_timeout": "text: the error lists the late ranks",
    "test_monitored_barrier_gloo_subgroup": "text: the error lists the late ranks",
}

BACKENDS = ("gloo", "weft")
TEST_SECONDS = 100  # torch kills the ranks of a test after this time
PASSED = "passed"
SKIPPED = "skipped"

Outcomes = dict[str, str]  # by test: PASSED, SKIPPED, or the error
_Error = tuple[type[BaseException], BaseException, TracebackType]


class _NameLikeGloo(str):
    """The name of a backend, in a comparison also gloo's: a few tests train on CPUs only if the backend is gloo."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return other == "gloo" or str.__eq__(self, other) is True

    def __hash__(self) -> int:
        return str.__hash__(self)


class _Results(unittest.TestResult):
    """Keeps the outcome of each test."""

    def __init__(self) -> None:
        super().__init__()
        self.outcomes: Outcomes = {}

    def _add(self, test: unittest.TestCase, outcome: str) -> None:
        self.outcomes[test.id().rpartition(".")[2]] = outcome

    def addSuccess(self, test: unittest.TestCase) -> None:
        super().addSuccess(test)
        self._add(test, PASSED)

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        super().addSkip(test, reason)
        self._add(test, SKIPPED)

    def addFailure(self, test: unittest.TestCase, err: _Error) -> None:
        super().addFailure(test, err)
        self._add(test, _summary(str(err[1])))

    def addError(self, test: unittest.TestCase, err: _Error) -> None:
        super().addError(test, err)
        self._add(test, _summary(str(err[1])))


def _summary(text: str) -> str:
    """Return the errors that the tracebacks of all ranks end with, once each; of other texts the last line."""
    errors = re.findall(r"^(?:\w+\.)*\w*(?:Error|Exception): .*", text, re.MULTILINE)
    return "; ".join(dict.fromkeys(errors)) or text.strip().rpartition("\n")[2] or "failed without a text"


def run_suite(backend: str, num_ranks: int, only: list[str]) -> Outcomes:
    """Run the suite, or the named tests, in this process. Call it once per process: torch reads the settings once."""
    folder = tempfile.mkdtemp(prefix="weft-suite-")
    os.environ |= {
        "BACKEND": "gloo",  # decides which tests are skipped
        "WORLD_SIZE": str(num_ranks),
        "INIT_METHOD": f"file://{folder}/init",
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(TEST_SECONDS),
    }
    from torch.testing._internal.distributed import distributed_test as suite

    if backend != "gloo":
        import weft  # noqa: F401  (registers the backend)

        suite.BACKEND = _NameLikeGloo(backend)
        suite.PROFILING_SUPPORTED_BACKENDS.append(backend)
        suite.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.append(backend)

    class Suite(suite.TestDistBackend, suite.DistributedTest._DistTestBase):  # type: ignore[misc,name-defined]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(multiprocessing.get_context("fork").Process)

    names = unittest.TestLoader().getTestCaseNames(Suite)
    results = _Results()
    unittest.TestSuite(Suite(name) for name in names if not only or name in only).run(results)
    return results.outcomes


def outcomes_of(backend: str, num_ranks: int, only: list[str]) -> Outcomes:
    """Run the suite in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="weft-outcomes-") as folder:
        path, log = Path(folder, "outcomes.json"), Path(folder, "log")
        arguments = ["--suite", backend, "--ranks", str(num_ranks), "--outcomes", path]
        command = [sys.executable, __file__, *map(str, arguments), *(["--only", *only] if only else [])]
        with log.open("wb") as output:
            subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False)
        if not path.exists():
            raise RuntimeError(f"the suite did not end with {backend}:\n{log.read_text(errors='replace')[-4000:]}")
        return json.loads(path.read_text())


def problems_of(by_ranks: dict[int, dict[str, Outcomes]], exempted: dict[str, str]) -> list[str]:
    """Return a line for each test that fails with weft only, without a reason, and for each reason without a test.

    by_ranks: the outcomes by number of ranks and backend.
    """
    problems = []
    compared: set[str] = set()
    differing: set[str] = set()
    for num_ranks, of_backends in by_ranks.items():
        for name, outcome in of_backends["gloo"].items():
            if outcome != PASSED:
                continue
            compared.add(name)
            on_weft = of_backends["weft"].get(name, "did not run")
            if on_weft == PASSED:
                continue
            differing.add(name)
            if name not in exempted:
                problems.append(f"{name} passes with gloo on {num_ranks} ranks, and with weft: {on_weft}")
    for name in exempted:
        if name in compared and name not in differing:
            problems.append(f"{name} passes with weft: remove it from EXEMPTED")
    return problems


def report(num_ranks: int, of_backends: dict[str, Outcomes], write: Callable[[str], object]) -> None:
    """Write the outcomes of each test that runs with gloo, and the counts."""
    on_gloo, on_weft = of_backends["gloo"], of_backends["weft"]
    run = [name for name, outcome in on_gloo.items() if outcome != SKIPPED]
    passed = [name for name in run if on_gloo[name] == PASSED]
    same = [name for name in passed if on_weft.get(name) == PASSED]
    write(f"{num_ranks} ranks, {len(run)} tests that run with gloo of {len(on_gloo)}")
    width = max(map(len, run), default=0)
    for name in run:
        outcomes = [on_gloo[name], on_weft.get(name, "did not run")]
        words = [outcome if outcome in (PASSED, SKIPPED) else "failed" for outcome in outcomes]
        write(f"  {name:{width}}  gloo {words[0]:7}  weft {words[1]:7}  {EXEMPTED.get(name, '')}".rstrip())
        for backend, outcome, word in zip(BACKENDS, outcomes, words, strict=True):
            if word == "failed":
                write(f"      {backend}: {outcome[:400]}")
    exempted = [name for name in passed if name not in same and name in EXEMPTED]
    write(f"  gloo passes {len(passed)}; weft passes {len(same)} of them, and {len(exempted)} are exempted")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[3, 4])
    parser.add_argument("--only", nargs="+", default=[], help="run these tests only")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--suite", choices=BACKENDS, help=argparse.SUPPRESS)
    parser.add_argument("--outcomes", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.suite:
        options.outcomes.write_text(json.dumps(run_suite(options.suite, options.ranks[0], options.only)))
        return 0
    by_ranks: dict[int, dict[str, Outcomes]] = {}
    for num_ranks in options.ranks:
        begin = time.monotonic()
        by_ranks[num_ranks] = {backend: outcomes_of(backend, num_ranks, options.only) for backend in BACKENDS}
        if not options.json:
            report(num_ranks, by_ranks[num_ranks], print)
            print(f"  {time.monotonic() - begin:.0f} s", flush=True)
    problems = problems_of(by_ranks, EXEMPTED)
    print(json.dumps({"outcomes": by_ranks, "problems": problems}) if options.json else "\n".join(problems))
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
