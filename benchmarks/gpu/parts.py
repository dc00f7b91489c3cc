"""The parts of a run in their order: what each runs, what it needs, and how much time it gets."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu import test_records

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
RECORDED = ROOT / "docs" / "benchmarks" / "gpu" / "results.json"  # the results of the last run that was committed
_TEST_NEEDS = ("pytest", "hypothesis", "lightning")
TOTAL_SECONDS = 540.0  # the total time for which the shares and limits below are set


@dataclass(frozen=True)
class Options:
    """The options of the command line.

    Attributes:
        device: "cuda", or "cpu" to try the code without a GPU.
        short: tiny sizes and a few tests, for a rehearsal.
        build: folder of the build.
        work: folder for files before they are copied to the results.
        jobs: parallel compilers.
        test_jobs: parallel pytest workers; 1: without pytest-xdist.
        has_test_timeout: whether pytest-timeout is installed.
        architecture: of the GPU, in the form of TORCH_CUDA_ARCH_LIST; None on the CPU.
    """

    device: str
    short: bool
    build: Path
    work: Path
    jobs: int
    test_jobs: int
    has_test_timeout: bool
    architecture: str | None


@dataclass(frozen=True)
class Part:
    """A command with a share of the time.

    Attributes:
        name: of the part, in results.json and on the command line.
        title: of its section on the page.
        command: what to run, in the repository's root.
        share_seconds: the time that is reserved for this part while earlier parts run.
        most_seconds: the largest limit of this part, if earlier parts leave time unused.
        needs: requirements of `gpu.machine`, without which the part is skipped.
        needs_build: whether it needs the package that the part "build" makes.
        environment: additional variables.
        files: names of files in the work folder that belong to the results.
        collect: returns the part's result from the work folder, None if there is none.
    """

    name: str
    title: str
    command: tuple[str, ...]
    share_seconds: float
    most_seconds: float
    needs: tuple[str, ...] = ()
    needs_build: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    collect: Callable[[Path], dict[str, Any] | None] | None = None

    def result(self, work: Path) -> dict[str, Any] | None:
        if self.collect is not None:
            return self.collect(work)
        path = work / f"{self.name}.json"
        return json.loads(path.read_text()) if path.is_file() else None


def parts(options: Options) -> list[Part]:
    """Return all parts; those whose results are worth most for their time come first."""
    return [
        _build(options),
        _smoke(options),
        _tests(options),
        _kernels(options),
        _candidates(options),
        _memory(options),
        _step(options),
        *([_nccl(options)] if options.device == "cuda" else []),
        _sanitizer(options, "memcheck"),
        _sanitizer(options, "racecheck"),
    ]


def _script(name: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, str(BENCHMARKS / name), *arguments)


def _module(name: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", f"gpu.{name}", *arguments)  # PYTHONPATH has benchmarks/


def _gpu(options: Options) -> tuple[str, ...]:
    return ("torch", "gpu") if options.device == "cuda" else ("torch",)


def _output(options: Options, name: str) -> tuple[str, str]:
    return "--output", str(options.work / f"{name}.json")


def _build(options: Options) -> Part:
    architecture = ("--architecture", options.architecture) if options.architecture else ()
    return Part(
        "build",
        "Build",
        _module("build", "--work", str(options.build), "--jobs", str(options.jobs), *architecture)
        + _output(options, "build"),
        share_seconds=130,
        most_seconds=200,
        needs=("torch", "cmake", "ninja", "compiler", "python_headers", "pybind11")
        + (("gpu", "nvcc") if options.device == "cuda" else ()),
        needs_build=False,
    )


def _smoke(options: Options) -> Part:
    return Part(
        "smoke",
        "Operators against float64 on the CPU",
        _module("smoke", "--device", options.device, *_output(options, "smoke"))
        + (("--short",) if options.short else ()),
        share_seconds=35,
        most_seconds=60,
        needs=_gpu(options),
    )


def _pytest(options: Options, name: str, *arguments: str) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return a command and its environment, for tests whose records are WORK/NAME.jsonl."""
    command = [sys.executable, "-m", "pytest", "-p", "gpu.pytest_plugin", "-p", "no:cacheprovider", "-q", "--no-header"]
    command += ["-rN", "--continue-on-collection-errors"]
    environment = {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "WEFT_GPU_RECORDS": str(options.work / f"{name}.jsonl"),
        "WEFT_GPU_RECORDED": str(RECORDED),
    }
    if options.short:
        environment["WEFT_GPU_TEST_COUNT"] = "4"
    return (*command, *arguments), environment


def _tests(options: Options) -> Part:
    arguments = ["-m", "cuda"] if options.device == "cuda" else ["-k", "on_cpu"]
    if options.test_jobs > 1:
        # Workers get one test at a time, because the tests are ordered by expected time.
        arguments += ["-n", str(options.test_jobs), "--maxschedchunk", "1"]
        if options.has_test_timeout:
            # A hanging kernel cannot be interrupted: the worker ends, and another takes its place.
            arguments += ["--timeout", "120", "--timeout-method", "thread"]
    command, environment = _pytest(options, "tests", *arguments, *test_records.files_with_cuda_tests(ROOT))
    return Part(
        "tests",
        "Tests marked cuda",
        command,
        share_seconds=95,
        most_seconds=TOTAL_SECONDS,
        needs=(*_gpu(options), *_TEST_NEEDS),
        environment={**environment, "TORCHINDUCTOR_COMPILE_THREADS": "4"},
        files=("tests.xml",),
        collect=test_records.collect,
    )


def _nccl(options: Options) -> Part:
    command, environment = _pytest(options, "nccl", "-m", "nccl", "tests/cuda_runtime/test_nccl_ranks.py")
    return Part(
        "nccl",
        "Tests over NCCL, with ranks that share the GPU",
        command,
        share_seconds=25,
        most_seconds=60,
        needs=(*_gpu(options), *_TEST_NEEDS, "shared_gpu"),
        environment={**environment, "NCCL_MULTI_RANK_GPU_ENABLE": "1"},
        collect=lambda work: test_records.collect(work, "nccl"),
    )


def _kernels(options: Options) -> Part:
    short = ("--tokens", "64", "--models", "tiny", "--samples", "2") if options.short else ()
    return Part(
        "kernels",
        "Kernels",
        _script("kernels_cuda.py", "--device", options.device, *short, "--json", *_output(options, "kernels")),
        share_seconds=65,
        most_seconds=120,
        needs=_gpu(options),
    )


def _candidates(options: Options) -> Part:
    short = ("--scale", "64", "--samples", "2") if options.short else ()
    return Part(
        "candidates",
        "Ways to compute the same result",
        _script("cuda_candidates.py", "--device", options.device, *short, "--json", *_output(options, "candidates")),
        share_seconds=15,
        most_seconds=40,
        needs=_gpu(options),
    )


def _memory(options: Options) -> Part:
    workload, columns, ranks = "feed_forward", ["stock", "weft", "weft_in_backward", "weft_by_rows"], "1248"
    if options.short:
        workload, columns, ranks = "language_model", ["weft"], "2"
    return Part(
        "memory",
        "Memory of a rank",
        _script(
            "memory.py",
            *("--device", options.device, "--simulate", "--json", *_output(options, "memory")),
            *("--workloads", workload, "--columns", *columns, "--ranks", *ranks),
        ),
        share_seconds=60,
        most_seconds=120,
        needs=(*_gpu(options), "lightning"),
    )


def _step(options: Options) -> Part:
    short = ("--model", "tiny", "--tokens", "32", "--samples", "2", "--variants", "weft") if options.short else ()
    trace = str(options.work / "trace.json.gz")
    return Part(
        "step",
        "A training step of Llama-shaped blocks",
        _script("block_step.py", "--device", options.device, *short, "--trace", trace, "--json")
        + _output(options, "step"),
        share_seconds=65,
        most_seconds=140,
        needs=_gpu(options),
        files=("trace.json.gz",),
    )


def _sanitizer(options: Options, name: str) -> Part:
    return Part(
        name,
        f"compute-sanitizer {name}",
        _module("sanitize", "--tool", name, "--device", options.device, *_output(options, name)),
        share_seconds=25,
        most_seconds=60,
        needs=(*_gpu(options), "compute-sanitizer") if options.device == "cuda" else ("torch",),
    )
