"""Prints the path of the fastest `python3` on the PATH that can create the development environment.

    python3 cmake/fastest_python.py

Tests spend most of their time in the interpreter, and builds of Python differ: one without profile-guided optimization
and in a shared library, as pyenv makes it by default, needs 1.15 times as long for the tests as Debian's. The
first interpreter on the PATH is taken unless another one is faster by more than `MARGIN`. An interpreter counts if it
is Python 3.10 or newer, has its headers, and can create an environment with pip.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

MARGIN = 1.1
# Interpreters run in turn, so that other work on the machine slows all of them.
ROUNDS = 3

# Prints the executable behind a wrapper and the processor seconds of the fastest of several runs, or nothing.
PROBE = """
import importlib.util, os, sys, sysconfig, time

class Counter:
    def __init__(self, start):
        self.value = start

    def next(self):
        return self.value + 1

def seconds():
    begin, table = time.process_time(), {}
    for number in range(100_000):
        table[number & 1023] = Counter(number).next()
    return time.process_time() - begin

has_headers = os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))
if sys.version_info >= (3, 10) and has_headers and importlib.util.find_spec("ensurepip"):
    print(sys.executable, min(seconds() for _ in range(5)))
"""


def candidates() -> list[str]:
    """Return the files named `python3` in the folders of the PATH, in its order, outside virtual environments."""
    folders = [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep) if folder]
    files = [folder / "python3" for folder in folders if not (folder.parent / "pyvenv.cfg").exists()]
    return [str(file) for file in files if os.access(file, os.X_OK)]


def seconds_of(interpreters: list[str]) -> dict[str, float]:
    """Return the least seconds of `PROBE` by executable, in the given order, without those that fail or print nothing.

    An executable that several wrappers start is measured once.
    """
    found: dict[str, float] = {}
    wrappers: dict[str, str] = {}
    for interpreter in interpreters:
        executable, seconds = _probe(interpreter)
        if executable and os.path.realpath(executable) not in map(os.path.realpath, found):
            found[executable] = seconds
            wrappers[executable] = interpreter
    for _ in range(ROUNDS - 1 if len(found) > 1 else 0):
        for executable, interpreter in wrappers.items():
            again, seconds = _probe(interpreter)
            if again:
                found[executable] = min(found[executable], seconds)
    return found


def _probe(interpreter: str) -> tuple[str, float]:
    """Return the executable behind `interpreter` and its seconds, or "" if it cannot create the environment."""
    result = subprocess.run([interpreter, "-I", "-c", PROBE], capture_output=True, text=True, check=False)
    if result.returncode != 0 or not result.stdout.strip():
        return "", 0.0
    executable, seconds = result.stdout.strip().rsplit(" ", 1)
    return executable, float(seconds)


def choose(seconds: dict[str, float]) -> str:
    """Return the first executable, or the fastest if it is faster by more than `MARGIN`."""
    first, fastest = next(iter(seconds)), min(seconds, key=seconds.__getitem__)
    return fastest if seconds[first] > MARGIN * seconds[fastest] else first


def main() -> None:
    seconds = seconds_of(candidates())
    print(choose(seconds) if seconds else "python3")


if __name__ == "__main__":
    main()
