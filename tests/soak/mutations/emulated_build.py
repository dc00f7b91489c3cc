"""Compiles and tests mutated copies of kernels/ with the commands of the build's kernels_emulated_test."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from soak.mutations.mutation import Mutation

ROOT = Path(__file__).resolve().parents[3]
TARGET = "tests/cpp/kernels/kernels_emulated_test"

# The launch files, which are compiled one by one, and filters for their tests. Files that compile faster come first.
SUITES = {
    "cuda/dropout_launch.cu": "*Dropout*:*Philox*",
    "cuda/optimizer_step_launch.cu": "*Optimizer*",
    "cuda/cross_entropy_launch.cu": "*CrossEntropy*",
    "cuda/activation_launch.cu": "*Activation*",
    "cuda/norm_launch.cu": "*Norm*",
}
# The orders of threads in which ctest runs the tests. Only kernels whose threads exchange values have several.
ORDERS = {
    "cuda/cross_entropy_launch.cu": ["forward", "reverse", "1"],
    "cuda/norm_launch.cu": ["forward", "reverse", "1"],
    "cuda/optimizer_step_launch.cu": ["forward", "reverse", "1"],
}
TEST_SECONDS = 600  # a time limit


class BuildError(RuntimeError):
    """The build lacks what the check needs, or a mutation does not compile."""


def launch_files_with(file: str, kernels: Path = ROOT / "kernels") -> list[str]:
    """Return the launch files that are or include `file`, a path below kernels/, in the order of SUITES."""

    def includes(source: str, seen: set[str]) -> set[str]:
        if source not in seen:
            seen.add(source)
            for name in re.findall(r'#include "([^"]+)"', (kernels / source).read_text()):
                for folder in ("cuda", "src"):
                    if (kernels / folder / name).exists():
                        includes(f"{folder}/{name}", seen)
        return seen

    return [launch for launch in SUITES if file in includes(launch, set())]


class EmulatedBuild:
    """The compile and link commands of kernels_emulated_test in a build folder, which must be up to date."""

    def __init__(self, folder: Path) -> None:
        if not (folder / TARGET).exists():
            raise BuildError(f"{folder} has no {TARGET}; run `make build` first.")
        self._folder = folder
        entries = json.loads((folder / "compile_commands.json").read_text())
        self._commands = {entry["output"]: shlex.split(entry["command"]) for entry in entries}
        self._objects = {
            launch: next(
                name for name in self._commands if name.endswith(f"/kernels/{launch}.o") and "emulated" in name
            )
            for launch in SUITES
        }
        ninja = shutil.which("ninja", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        command = [ninja or "ninja", "-C", str(folder), "--quiet", "-t", "commands", "-s", TARGET]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        self._link = shlex.split(printed.strip().removeprefix(": &&").removesuffix("&& :"))

    def executable(self, launch: str, mutation: Mutation | None, folder: Path) -> Path:
        """Compile a launch file in `folder`, from a mutated copy of kernels/, and link the tests with it."""
        copy = folder / "kernels"
        if not copy.exists():
            for name in ("cuda", "src", "include"):
                shutil.copytree(ROOT / "kernels" / name, copy / name)
            if mutation is not None:
                path = copy / mutation.file
                path.write_text(mutation.apply(path.read_text()))
        object_file = folder / "mutated.o"
        command = [argument.replace(f"{ROOT}/kernels", str(copy)) for argument in self._commands[self._objects[launch]]]
        # -O0 halves the time of a compilation. Debug information is of no use here.
        self._run([*_with_output(command, object_file), "-O0", "-g0"])
        link = [argument for argument in self._link if argument != self._objects[launch]]
        # The mutated object comes first, so that the linker takes inline functions of several objects from it.
        link.insert(next(i for i, argument in enumerate(link) if argument.endswith(".o")), str(object_file))
        result = folder / "mutated_test"
        self._run(_with_output(link, result))
        return result

    def failure(self, executable: Path, launch: str, cases: str = "") -> str:
        """Return how the tests of a launch file fail, up to the first failure; empty if they pass in all orders."""
        for order in ORDERS.get(launch, ["forward"]):
            environment = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "ASAN_OPTIONS": "detect_leaks=0:symbolize=0",
                "WEFT_EMULATED_ORDER": order,
            }
            command = [str(executable), "--gtest_fail_fast", f"--gtest_filter={cases or SUITES[launch]}"]
            try:
                run = subprocess.run(
                    command,
                    capture_output=True,
                    text=True,
                    errors="replace",
                    check=False,
                    env=environment,
                    timeout=TEST_SECONDS,
                )
            except subprocess.TimeoutExpired:
                return f"{order}: the time limit"
            output = run.stdout + run.stderr
            if "Running 0 tests" in output:
                raise BuildError(f"no test matches {command[-1]}; correct the list in tests/soak/mutations.")
            if run.returncode != 0:
                return f"{order}: {_finder(output)}"
        return ""

    def _run(self, command: list[str]) -> None:
        run = subprocess.run(command, cwd=self._folder, capture_output=True, text=True, check=False)
        if run.returncode != 0:
            raise BuildError(run.stderr.strip()[-2000:])


def _with_output(command: list[str], path: Path) -> list[str]:
    place = command.index("-o") + 1
    return [*command[:place], str(path), *command[place + 1 :]]


def _finder(output: str) -> str:
    """Return the first test that failed, or that ran when the process ended, and the error of a sanitizer."""
    tests = re.findall(r"\[  FAILED  \] ([^\s,]+)", output) or re.findall(r"\[ RUN      \] (\S+)", output)[-1:]
    errors = re.findall(r"AddressSanitizer: ([\w-]+)|runtime error: ([^\n]{1,40})", output)
    error = f" ({''.join(errors[0])})" if errors else ""
    return f"{tests[0] if tests else 'no test'}{error}"
