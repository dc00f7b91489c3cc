"""Runs `gpu.sanitizer_suite` under a tool of compute-sanitizer, and writes what the tool reports as JSON.

PYTHONPATH=benchmarks python -m gpu.sanitize --tool memcheck --output FILE
PYTHONPATH=benchmarks python -m gpu.sanitize --tool memcheck --device cpu    # the suite without the tool
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu.machine import cuda_tool

_SUITE = [sys.executable, "-m", "gpu.sanitizer_suite"]
_ERROR_STATUS = 99
_MAX_MESSAGES = 60
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")


def filter_options(help_text: str) -> list[str]:
    """Return the options that restrict the tool to weft's kernels; they differ between releases."""
    if "--kernel-name" in help_text:
        return ["--kernel-name", "kernel_substring=weft"]
    return ["--kernel-regex", "kns=weft"] if "--kernel-regex" in help_text else []


def errors_of(output: str) -> tuple[int | None, list[str]]:
    """Return the number of errors in the tool's output (None: the tool printed no summary), and its messages."""
    lines = [line.removeprefix("=========").strip() for line in output.splitlines() if line.startswith("=========")]
    summaries = [int(found[1]) for line in lines if (found := _SUMMARY.search(line))]
    messages = [line for line in lines if line and not line.startswith("COMPUTE-SANITIZER")]
    return (sum(summaries) if summaries else None), messages[:_MAX_MESSAGES]


def run_tool(tool: str, sanitizer: str, options: Sequence[str], output: Path) -> dict[str, Any]:
    """Run the suite under the tool; return the number of calls, of errors, and the messages."""
    count = output.with_suffix(".count")
    count.unlink(missing_ok=True)
    suite = [*_SUITE, "--output", str(count)]
    command = [sanitizer, "--tool", tool, "--error-exitcode", str(_ERROR_STATUS), *options, *suite]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    lines = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=environment
    ) as process:
        for line in process.stdout or ():
            lines.append(line)
            print(line, end="", flush=True)  # the log has it even if this process is killed
    errors, messages = errors_of("".join(lines))
    calls = json.loads(count.read_text())["calls"] if count.is_file() else 0
    result: dict[str, Any] = {"tool": tool, "calls": calls, "errors": errors, "messages": messages if errors else []}
    result["status"] = process.returncode
    if errors is None or not calls:
        result["problem"] = (
            f"{tool} ended with status {process.returncode} after {calls} calls, without a summary of errors."
        )
    elif errors or process.returncode:
        result["problem"] = f"{tool} reports {errors} errors; the suite ended with status {process.returncode}."
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tool", default="memcheck", choices=["memcheck", "racecheck", "initcheck", "synccheck"])
    parser.add_argument("--device", default="cuda", help="cuda, or cpu: the suite without the tool")
    parser.add_argument("--output", type=Path, default=Path("sanitize.json"), metavar="FILE")
    args = parser.parse_args()
    if args.device != "cuda":
        command = [*_SUITE, "--device", args.device, "--output", str(args.output)]
        status = subprocess.run(command, check=False).returncode
        if status == 0:
            args.output.write_text(json.dumps({**json.loads(args.output.read_text()), "errors": 0, "messages": []}))
        return status
    sanitizer = cuda_tool("compute-sanitizer", os.environ)
    if sanitizer is None:
        print("there is no compute-sanitizer on PATH or in CUDA_HOME; it is needed: install the CUDA toolkit's.")
        return 2
    help_text = subprocess.run([sanitizer, "--help"], capture_output=True, text=True, check=False).stdout
    result = run_tool(args.tool, sanitizer, filter_options(help_text), args.output)
    if not result["calls"]:  # for example, this release does not support an option
        result = run_tool(args.tool, sanitizer, [], args.output)
    args.output.write_text(json.dumps(result))
    return 1 if "problem" in result else 0


if __name__ == "__main__":
    sys.exit(main())
