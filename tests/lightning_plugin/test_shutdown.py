"""The whole process tree ends within 10 s of a signal, an exception or a kill, whatever the ranks are doing.

On a loaded machine, where a process gets only a part of a core, the limit is longer in proportion.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.processes import ProcessTree, assert_nothing_left, on_busy_machine, run_process

SCRIPT = Path(__file__).parent / "scripts" / "hang.py"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
LIMIT_SECONDS = 10.0

Stop = Callable[[ProcessTree, dict[int, int]], None]


def _signal_rank_0(signum: int) -> Stop:
    return lambda tree, pids: os.kill(pids[0], signum)


def _signal_rank_1(signum: int) -> Stop:
    return lambda tree, pids: os.kill(pids[1], signum)


def _signal_all(signum: int) -> Stop:
    return lambda tree, pids: tree.send_signal(signum, to_group=True)


def _wait_for_exception(tree: ProcessTree, pids: dict[int, int]) -> None:
    """Wait until a rank raises by itself, a second after it is ready."""
    time.sleep(1.0)


# Case -> the actions of (rank 0, rank 1) in two process trees, which run in parallel, and how to stop a tree.
PAIRS = {
    "SIGINT": ([("compute", "compute"), ("wait", "compute")], _signal_rank_0(signal.SIGINT)),
    "Ctrl-C": ([("compute", "compute"), ("wait", "compute")], _signal_all(signal.SIGINT)),
    "SIGTERM": ([("compute", "compute"), ("wait", "compute")], _signal_rank_0(signal.SIGTERM)),
    "exception on rank 0": ([("raise", "compute"), ("raise", "wait")], _wait_for_exception),
    "exception on rank 1": ([("compute", "raise"), ("wait", "raise")], _wait_for_exception),
    "SIGKILL of rank 0": ([("compute", "compute"), ("compute", "wait")], _signal_rank_0(signal.SIGKILL)),
    "SIGKILL of rank 1": ([("compute", "compute"), ("wait", "compute")], _signal_rank_1(signal.SIGKILL)),
}


def _check(launcher: list[str], actions: tuple[str, str], stop: Stop, warm_processes: int = 0) -> str:
    """Run a tree until it hangs, stop it, and assert that it ends in time; return its stderr."""
    with ProcessTree([*launcher, str(SCRIPT), *actions], env=ENVIRONMENT, warm_processes=warm_processes) as tree:
        for rank in (0, 1):
            tree.wait_for_text(
                f"READY {rank}", timeout=240
            )  # imports are slow on a loaded machine; the limit counts from the stop
        pids = {int(r): int(pid) for r, pid in re.findall(r"READY (\d) (\d+)", tree.stdout)}
        time.sleep(0.2)  # time from the READY line to the hang
        stop(tree, pids)
        deadline = time.monotonic() + on_busy_machine(LIMIT_SECONDS)
        result = tree.wait(deadline - time.monotonic())
        assert_nothing_left(tree.pgid, within=deadline - time.monotonic())
        assert result.returncode != 0
        return result.stderr


@pytest.mark.parametrize("case", PAIRS)
def test_no_process_is_left(case: str) -> None:
    trees, stop = PAIRS[case]
    # One tree starts new interpreters, as a user does.
    num_warm = (2, 0 if case == "SIGTERM" else 2)
    with ThreadPoolExecutor(len(trees)) as pool:
        for stderr in pool.map(lambda *tree: _check([sys.executable], tree[0], stop, tree[1]), trees, num_warm):
            assert stop is not _wait_for_exception or "this rank fails on purpose" in stderr


def test_no_process_is_left_under_torchrun() -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    cases = [
        (("compute", "raise"), _wait_for_exception),
        (("wait", "compute"), lambda tree, pids: tree.send_signal(signal.SIGTERM)),
    ]
    with ThreadPoolExecutor(len(cases)) as pool:
        list(pool.map(lambda case: _check(launcher, *case, warm_processes=3), cases))


def test_error_on_all_ranks_has_one_traceback() -> None:
    python = [sys.executable]
    trees = ((python, 2), ([*python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"], 3))
    with ThreadPoolExecutor(len(trees)) as pool:
        for stderr in pool.map(lambda tree: _check(tree[0], ("raise", "raise"), _wait_for_exception, tree[1]), trees):
            rank_lines = [line for line in stderr.splitlines() if line.startswith(("[rank0]:", "[rank1]:"))]
            assert [line for line in rank_lines if "Traceback" in line] == rank_lines[:1], stderr
            assert rank_lines[-1].endswith("RuntimeError: this rank fails on purpose"), stderr
            # torchrun may end the second rank before it prints its line.
            same = re.findall(r"^weft: rank \d raised the same RuntimeError as rank \d: see", stderr, re.MULTILINE)
            assert len(same) == 1 or ("Sending process" in stderr and not same), stderr


AT_EXIT = """
import weft.lightning
from weft._plugin.process_guard import guard

def fails():
    raise RuntimeError("this hook failed")

guard().on_clean_exit(lambda: print("the other hook ran"))
guard().on_clean_exit(fails)
"""


def test_failing_exit_hook_does_not_stop_others() -> None:
    result = run_process([sys.executable, "-c", AT_EXIT], timeout=100, warm_processes=1)
    assert result.stdout.splitlines() == ["the other hook ran"]
    assert "RuntimeError: this hook failed" in result.stderr


def test_failed_process_that_hangs_at_exit_ends_with_status_1(tmp_path: Path) -> None:
    """The sleep, registered first, runs after the guard's exit handler and does not end in time."""
    script = tmp_path / "hang.py"
    script.write_text(
        "import atexit, time\n"
        "atexit.register(time.sleep, 60)\n"
        "import weft.lightning\n"
        "from weft._plugin.process_guard import guard\n"
        "guard()\n"
        "raise RuntimeError('on purpose')\n"
    )
    start = time.monotonic()
    result = run_process([sys.executable, str(script)], timeout=55, env=ENVIRONMENT)
    assert result.returncode == 1 and "on purpose" in result.stderr
    assert time.monotonic() - start < 50
