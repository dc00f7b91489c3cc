"""One command for a machine with a GPU: build, check, measure, and report within nine minutes.

    python3 benchmarks/gpu                             # what `make gpu` runs
    python3 benchmarks/gpu --parts build smoke tests   # only these
    python3 benchmarks/gpu --short --device cpu --installed    # a rehearsal with the installed weft, without a GPU
    python3 benchmarks/gpu --page [RESULTS]            # docs/benchmarks/gpu.md; with results, stores them, too

Environment: OUT, the folder of the results (gpu_results); WEFT_GPU_SECONDS, the limit of all parts together (540).
The exit status is 0 if every part passed, 1 if one failed, was skipped or reached its limit.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.pop(0)  # this folder
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu import build
from gpu.machine import Machine, examine
from gpu.page import page_of
from gpu.parts import RECORDED, ROOT, TOTAL_SECONDS, Options, Part, parts
from gpu.results import Results
from gpu.run import Run

PAGE = ROOT / "docs" / "benchmarks" / "gpu.md"
_TEST_JOBS = 4  # two ranks each, and 16 cores


def main() -> int:
    arguments = _arguments()
    if arguments.page is not None:
        return _write_page(Path(arguments.page))
    start = time.monotonic()
    signal.signal(signal.SIGTERM, _interrupt)
    work = Path(arguments.work).resolve()
    measured_environment = dict(each.split("=", maxsplit=1) for each in arguments.env)
    environment = _environment(None if arguments.installed else work)
    print("Examining the machine.", flush=True)
    machine = examine({**environment, **measured_environment}, arguments.device)
    for sentence in machine.missing.values():
        print(f"Missing: {sentence}", flush=True)
    options = _options(arguments, machine, work)
    chosen = [part for part in parts(options) if part.name in arguments.parts]
    if arguments.installed:
        chosen = [part for part in chosen if part.name != "build"]
    files = _prepare(work, chosen)
    report: dict[str, Any] = {
        "benchmark": "gpu",
        "short": arguments.short,
        "device": arguments.device,
        "total_seconds": arguments.seconds,
        "machine": machine.facts,
        "missing": list(machine.missing.values()),
    }
    results = Results(Path(arguments.out), report, files)
    run = Run(
        chosen,
        machine,
        results,
        work / "parts",
        total_seconds=arguments.seconds - (time.monotonic() - start),
        scale=arguments.seconds / TOTAL_SECONDS,
        environment=environment,
        measured_environment=measured_environment,
        has_package=lambda: arguments.installed or build.has_package(options.build),
    )
    passed = run.run()
    print(f"Results: {results.folder}", flush=True)
    return 0 if passed else 1


def _arguments() -> argparse.Namespace:
    names = [part.name for part in parts(Options("cuda", False, Path(), Path(), 1, 1, False, None))]
    parser = argparse.ArgumentParser(prog="benchmarks/gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: try the code without a GPU")
    parser.add_argument("--short", action="store_true", help="tiny sizes and a few tests: a rehearsal")
    parser.add_argument("--parts", nargs="+", choices=names, default=names, help="run only these")
    parser.add_argument("--installed", action="store_true", help="use the installed weft; do not build")
    parser.add_argument("--out", default=os.environ.get("OUT", "gpu_results"), metavar="FOLDER", help="for the results")
    parser.add_argument("--work", default=ROOT / "build" / "gpu", metavar="FOLDER", help="for the build and the logs")
    seconds = float(os.environ.get("WEFT_GPU_SECONDS") or TOTAL_SECONDS)
    parser.add_argument("--seconds", type=float, default=seconds, help="limit of all parts together")
    parser.add_argument(
        "--env", action="append", default=[], metavar="NAME=VALUE", help="variable of all parts except the build"
    )
    parser.add_argument(
        "--page",
        nargs="?",
        const=str(RECORDED),
        metavar="RESULTS",
        help="only write the page; RESULTS, the results.json of a run, is stored in docs/benchmarks/gpu first",
    )
    arguments = parser.parse_args()
    for each in arguments.env:
        if "=" not in each:
            parser.error(f"--env got {each}; give NAME=VALUE.")
    if arguments.seconds <= 0:
        parser.error(f"--seconds got {arguments.seconds}; give a positive number.")
    return arguments


def _options(arguments: argparse.Namespace, machine: Machine, work: Path) -> Options:
    capability = machine.facts.get("capability")
    cpus = machine.facts.get("cpus", 1)
    plugins = machine.facts.get("pytest_plugins", [])
    parallel_tests = "xdist" in plugins and cpus >= 4 * _TEST_JOBS and not arguments.short
    return Options(
        device=arguments.device,
        short=arguments.short,
        build=work,
        work=work / "parts",
        jobs=cpus,
        test_jobs=_TEST_JOBS if parallel_tests else 1,
        has_test_timeout="pytest_timeout" in plugins,
        architecture=f"{capability[0]}.{capability[1]}" if arguments.device == "cuda" and capability else None,
    )


def _environment(work: Path | None) -> dict[str, str]:
    """Return the environment of all parts. `work`: the folder where weft is built; None: weft is installed."""
    environment = dict(os.environ)
    folders = [str(build.site_of(work))] if work is not None else []
    folders += [str(ROOT / "benchmarks"), *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(folders)
    environment["PYTHONUNBUFFERED"] = "1"  # so that logs of killed parts are complete
    return environment


def _prepare(work: Path, chosen: list[Part]) -> tuple[str, ...]:
    """Empty the folder for the parts' files, but not the folder of the build; return the names of result files."""
    shutil.rmtree(work / "parts", ignore_errors=True)
    (work / "parts").mkdir(parents=True)
    return tuple(name for part in chosen for name in part.files)


def _write_page(results: Path) -> int:
    if results != RECORDED:
        if not results.is_file():
            print(f"--page got {results}, which does not exist; give the results.json of a run.", file=sys.stderr)
            return 2
        RECORDED.parent.mkdir(exist_ok=True)
        shutil.copyfile(results, RECORDED)
    report = json.loads(results.read_text()) if results.is_file() else None
    PAGE.write_text(page_of(report))
    return 0


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
