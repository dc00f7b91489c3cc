"""Runs Lightning's own tests of ModelParallelStrategy on CPU ranks, with its class and with weft's, and compares.

    git clone --branch 2.6.5 https://github.com/Lightning-AI/pytorch-lightning /tmp/lightning
    python tests/soak/lightning_tests.py /tmp/lightning

The checkout must have the version of the installed Lightning. The tests are copied to a temporary folder; in the copies
devices are CPUs, compiled modules use the backend "eager", and in half of them the class is weft's. A test for two or
four GPUs runs in one process per rank. Prints one line per test; exits with 1 if weft fails a test that stock passes
and that docs/drop_in.md does not list with a reason. Needs about 5 minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs/drop_in.md"
FILES = ("test_model_parallel.py", "test_model_parallel_integration.py")
CLASSES = {"fabric": "weft.lightning.fabric", "pytorch": "weft.lightning"}
SECONDS_OF_TEST = 60
ATTEMPTS = 20

# The tests' only dependencies within Lightning's test suite: a mark for the devices, and a data set.
RUN_IF = """
import pytest

def RunIf(min_cuda_gpus=0, **_):
    return getattr(pytest.mark, f"ranks{min_cuda_gpus or 1}")
"""
# Each rank appends a line to its report when it begins a test, with "" for the result, and when the test has ended.
CONFTEST = """
import json
import os
import pytest
import torch

_ports = iter(range(int(os.environ["TEST_PORT"]), 65536))
_SINGLE = ("test_model_parallel_single_file_checkpoint_with_compile",)  # for two GPUs, but its Trainer has one device

def pytest_configure(config):
    for number in (1, 2, 4):
        config.addinivalue_line("markers", f"ranks{number}: the number of ranks")

def _num_ranks(item):
    if item.originalname in _SINGLE:
        return 1
    return max(number for number in (1, 2, 4) if number == 1 or item.get_closest_marker(f"ranks{number}"))

def pytest_collection_modifyitems(items):
    done = set(json.loads(os.environ["TEST_DONE"]))
    items[:] = [i for i in items if _num_ranks(i) == int(os.environ["TEST_RANKS"]) and i.nodeid not in done]

def _record(name, result):
    with open(os.environ["TEST_REPORT"], "a") as report:
        print(json.dumps([name, result]), file=report)

def pytest_runtest_logstart(nodeid, location):
    _record(nodeid, "")

_errors = {}

def pytest_runtest_logreport(report):
    if not report.passed:
        text = "skipped" if report.skipped else str(report.longrepr.reprcrash.message)
        _errors[report.nodeid] = " ".join(text.split())[:300]
    if report.when == "teardown":
        _record(report.nodeid, _errors.get(report.nodeid, "passed"))

@pytest.fixture(autouse=True)
def _group():
    os.environ["MASTER_PORT"] = str(next(_ports))
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
"""


def write_tests(checkout: Path, folder: Path, with_weft: bool) -> list[Path]:
    """Write the changed tests below `folder`; return their paths."""
    (folder / "conftest.py").write_text(CONFTEST)
    written = []
    for package, module in CLASSES.items():
        source, target = checkout / f"tests/tests_{package}", folder / f"tests_{package}"
        for name in ("", "strategies", "helpers"):
            (target / name).mkdir(parents=True)
            (target / name / "__init__.py").touch()
        (target / "helpers/runif.py").write_text(RUN_IF)
        (target / "helpers/datasets.py").write_text((source / "helpers/datasets.py").read_text())
        for name in FILES:
            text = (source / "strategies" / name).read_text()
            text = re.sub(r'accelerator(="|": ")(auto|cuda|gpu)"', r'accelerator\1cpu"', text)
            text = re.sub(r'torch\.device\("cuda", (self|fabric)\.local_rank\)', 'torch.device("cpu")', text)
            text = text.replace('== "cuda"', '== "cpu"').replace('init_device_mesh("cuda"', 'init_device_mesh("cpu"')
            text = re.sub(r"torch\.compile\(([\w.]+)\)", r'torch.compile(\1, backend="eager")', text)
            if with_weft:
                text, num_replaced = re.subn(
                    r"^(from lightning\.\S+ import )ModelParallelStrategy(?:, (\w+))?$",
                    lambda found, module=module: (
                        f"from {module} import WeftModelParallelStrategy as ModelParallelStrategy"
                        + (f"\n{found[1]}{found[2]}" if found[2] else "")
                    ),
                    text,
                    flags=re.MULTILINE,
                )
                assert num_replaced == 1, (name, num_replaced)
            written.append(target / "strategies" / name)
            written[-1].write_text(text)
    return written


def _free_port() -> int:
    """Return a port below which nothing is likely to listen on the next hundred."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port - 200 if port > 60000 else port + 100


def run_file(path: Path, folder: Path, num_ranks: int) -> dict[str, str]:
    """Run a file's tests for `num_ranks`; return {test: "passed", "skipped", or its error}.

    A test that fails on a rank, or runs for too long, ends its process; the tests after it run in new processes.
    """
    results: dict[str, str] = {}
    for _ in range(ATTEMPTS):
        found, is_complete = _run_session(path, folder, num_ranks, list(results))
        results |= found
        if is_complete:
            break
    return results


def _run_session(path: Path, folder: Path, num_ranks: int, done: list[str]) -> tuple[dict[str, str], bool]:
    port = _free_port()
    reports = [folder / f"report{rank}" for rank in range(num_ranks)]
    processes = []
    for rank, report in enumerate(reports):
        report.unlink(missing_ok=True)
        command = [
            sys.executable,
            *["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-c"],
            os.devnull,
        ]
        command += [f"--rootdir={folder}", f"--timeout={SECONDS_OF_TEST}", "--timeout-method=thread"]
        command += [str(path.relative_to(folder))]
        environment = {**os.environ, "TEST_PORT": str(port), "TEST_RANKS": str(num_ranks), "TEST_REPORT": str(report)}
        environment |= {"TEST_DONE": json.dumps(done), "OMP_NUM_THREADS": "1"}
        environment |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
        if num_ranks > 1:
            environment |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": str(num_ranks)}
        with (folder / f"output{rank}.txt").open("w") as output:
            processes.append(
                subprocess.Popen(
                    command, cwd=folder, env=environment, stdout=output, stderr=output, start_new_session=True
                )
            )
    for process in processes:
        try:
            process.wait(SECONDS_OF_TEST * 20)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    by_rank = [dict(map(json.loads, report.read_text().splitlines())) if report.exists() else {} for report in reports]
    results: dict[str, str] = {}
    for name in dict.fromkeys(name for found in by_rank for name in found):
        of_ranks = [found.get(name, "") for found in by_rank]
        error = next((result for result in of_ranks if result not in ("", "passed", "skipped")), None)
        is_unfinished = error is None and "" in of_ranks
        results[name] = f"ran for more than {SECONDS_OF_TEST} s" if is_unfinished else error or of_ranks[0]
        if is_unfinished or error is not None:
            return results, False  # what other ranks have begun after it shows nothing
    return results, True


def listed_tests(page: str) -> set[str]:
    """Return the tests that the page lists with a reason why they do not pass: in rows `| test | file | reason |`."""
    section = page.partition("## Tests that do not pass")[2].partition("\n## ")[0]
    return set(re.findall(r"^\| `(test_\w+)`", section, flags=re.MULTILINE))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkout", type=Path, help="a checkout of Lightning's repository")
    parser.add_argument("--only", choices=("stock", "weft"), help="run one of the two classes only")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    found: dict[str, dict[str, str]] = {}
    for kind in (args.only,) if args.only else ("stock", "weft"):
        results: dict[str, str] = {}
        with tempfile.TemporaryDirectory(prefix="weft-lightning-tests-") as name:
            folder = Path(name)
            paths = write_tests(args.checkout, folder, kind == "weft")
            for num_ranks in (1, 2, 4):
                for path in paths:
                    results |= run_file(path, folder, num_ranks)
        found[kind] = results
        for test, result in results.items() if args.only else ():
            print(f"{result[:100]:100} {test}")
    if args.only:
        return 0
    listed = listed_tests(PAGE.read_text()) if PAGE.exists() else set()
    names = list(dict.fromkeys([*found["stock"], *found["weft"]]))
    rows = [(name, *(found[kind].get(name, "not run") for kind in ("stock", "weft"))) for name in names]
    worse = [name for name, stock, weft in rows if stock == "passed" != weft]
    unlisted = [name for name in worse if name.rpartition("::")[2].partition("[")[0] not in listed]
    if args.json:
        print(json.dumps({"tests": rows, "worse": worse, "unlisted": unlisted}))
    else:
        for name, stock, weft in rows:
            print(f"{name}\n    stock: {stock}\n    weft:  {weft}")
        both = sum(stock == weft == "passed" for _, stock, weft in rows)
        print(f"{len(rows)} tests: both pass {both}, only stock {len(worse)}, of these not listed: {unlisted}")
    return 1 if unlisted or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
