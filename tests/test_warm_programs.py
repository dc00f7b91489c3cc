"""A program in a warm process sees what it would see in a new interpreter, and its tree is found and killed."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest

from support.processes import ProcessTree, assert_nothing_left, processes_left, run_process

STATE = """
import json, os, signal, subprocess, sys, threading
from pathlib import Path

def state():
    return {
        "name": __name__, "file": globals().get("__file__"), "argv": sys.argv, "path": sys.path[0], "cwd": os.getcwd(),
        "variables": sorted(name for name in os.environ if name not in ("LINES", "COLUMNS")),
        "token": os.environ["WEFT_TEST_TREE"].encode() in Path("/proc/self/environ").read_bytes(),
        "is_leader": os.getsid(0) == os.getpid(), "interrupt": signal.getsignal(signal.SIGINT).__name__,
        "threads": threading.active_count(), "stdin": sys.stdin.read(), "test_modules": "pytest" in sys.modules,
    }
"""
PRINT = STATE + "\nprint(json.dumps(state()))\nsys.exit(int(sys.argv[1]))\n"


@pytest.mark.parametrize("is_file", [True, False])
def test_same_state_as_new_interpreter(tmp_path: Path, is_file: bool) -> None:
    script = tmp_path / "script.py"
    script.write_text(PRINT)
    command = [sys.executable, *([script] if is_file else ["-c", PRINT]), "3", "more"]
    new, warm = (run_process(command, cwd=tmp_path, env={"GIVEN": "1"}, warm_processes=number) for number in (0, 1))
    assert new.returncode == warm.returncode == 3, warm.stderr
    assert json.loads(warm.stdout) == json.loads(new.stdout)
    assert "GIVEN" in json.loads(warm.stdout)["variables"]


PARENT = """
import os, subprocess, sys
import torch
from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import Popen  # that of torchrun
if len(sys.argv) == 1:
    torch.started_by_parent = True
    child = Popen([sys.executable, sys.argv[0], "child"], env={**os.environ, "RANK": "1"})
    print("parent", child.wait(), flush=True)
    source = "import sys; print('torch' in sys.modules)"
    child = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE)
    print("new", child.communicate()[0].decode().strip(), flush=True)
    raise ValueError("on purpose")
is_warm = "weft._plugin.process_guard" in sys.modules
print("child", os.environ["RANK"], hasattr(torch, "started_by_parent"), is_warm, flush=True)
sys.exit(5)
"""


@pytest.mark.parametrize("warm_processes", [0, 1])
def test_rendezvous_of_the_pytest_process_is_not_inherited(
    monkeypatch: pytest.MonkeyPatch, warm_processes: int
) -> None:
    monkeypatch.setenv("MASTER_PORT", "29999")
    monkeypatch.setenv("RANK", "1")
    source = "import os; print([os.environ.get(name) for name in ('MASTER_PORT', 'RANK', 'WEFT_CACHE_DIR')])"
    command = [sys.executable, "-c", source]
    run = run_process(command, env={"RANK": "3"}, warm_processes=warm_processes)
    assert run.stdout.strip() == "[None, '3', '']", run.stderr


def test_child_is_warm_and_without_state_of_its_parent(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(PARENT)
    result = run_process([sys.executable, script], cwd=tmp_path, warm_processes=2)
    assert result.stdout.splitlines() == ["child 1 False True", "parent 5", "new False"], result.stderr
    assert result.returncode == 1 and result.stderr.splitlines()[-1] == "ValueError: on purpose"


SPAWNER = """
import multiprocessing, os, sys

def work(queue, text):
    import torch
    is_warm = "weft._plugin.process_guard" in sys.modules
    queue.put((text, os.getppid(), hasattr(torch, "started_by_parent"), is_warm, __name__))
    sys.exit(3)

if __name__ == "__main__":
    import torch
    torch.started_by_parent = True
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=work, args=(queue, f"given {i}")) for i in range(2)]
    for process in processes:
        process.start()
    answers = sorted(queue.get() for _ in processes)
    for process in processes:
        process.join()
    print([(a[0], a[1] == os.getpid(), *a[2:]) for a in answers], [p.exitcode for p in processes])
"""


def test_spawned_processes_are_warm_and_without_state_of_their_parent(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SPAWNER)
    result = run_process([sys.executable, script], cwd=tmp_path, warm_processes=3)
    expected = [(f"given {i}", True, False, True, "__mp_main__") for i in range(2)]
    assert result.stdout.strip() == f"{expected} [3, 3]", result.stdout + result.stderr
    assert result.returncode == 0


def test_signals_and_processes_in_other_sessions() -> None:
    source = "import os, time\nif os.fork() == 0:\n    os.setsid()\nprint('ready', flush=True)\ntime.sleep(100)"
    with ProcessTree([sys.executable, "-c", source], warm_processes=1) as tree:
        tree.wait_for_text("ready\nready")
        assert len(processes_left(tree.pgid)) == 2
        tree.send_signal(signal.SIGINT)
        assert tree.wait().returncode == -signal.SIGINT
        assert len(processes_left(tree.pgid)) == 1
        tree.kill()
        assert_nothing_left(tree.pgid)
