"""The page of a run's results, in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

_INTRODUCTION = """# One GPU

`make gpu` builds weft on a machine with one GPU, runs the parts below one after another, and writes this page. It needs
no network and no virtual environment, but a Python with torch for CUDA, Lightning, pytest, hypothesis, numpy, pyyaml
and pybind11, and `nvcc`, `cmake` and `ninja`. All parts together take at most `WEFT_GPU_SECONDS` (540); each part has a
limit of its own. The results of a part are written to `$OUT` (`gpu_results`) when it ends.

```
make gpu                                                 # on the machine with the GPU
python benchmarks/gpu --page gpu_results/results.json    # stores results in the repository, and writes this page
```
"""
_NOT_RUN = """
**Not run yet.** No CUDA code of weft has run on a GPU; there are no figures.
"""


def page_of(report: dict[str, Any] | None) -> str:
    """Return the page of a run's report, as in results.json. `report` None: the page before the first run."""
    if report is None:
        return _INTRODUCTION + _NOT_RUN
    sections = [_INTRODUCTION, _machine(report), _parts(report)]
    for part in report.get("parts", []):
        render = _RENDERERS.get(part["name"])
        result = part.get("result")
        if render is not None and result:
            try:
                text = render(result)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                # An aborted part leaves an incomplete result.
                text = f"The result has another form than expected ({type(error).__name__}: {error}).\n"
            sections.append(f"\n## {part['title']}\n\n{text}")
    return "".join(sections)


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a table; numbers in its cells must be formatted already."""
    lines = [list(head), *[[str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]]
    texts = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([texts[0], f"|{'---|' * len(lines[0])}", *texts[1:]]) + "\n"


def _machine(report: dict[str, Any]) -> str:
    facts = report.get("machine", {})
    device = facts.get("gpu", "no GPU")
    if "gpu_bytes" in facts:
        device += f", {facts['gpu_bytes'] / 2**30:.0f} GiB, {facts.get('multiprocessors')} multiprocessors"
    if "driver" in facts:
        device += f", driver {facts['driver']}"
    text = f"\n{device}; {facts.get('cpu', 'unknown processor')}, {facts.get('cpus')} cores; torch {facts.get('torch')}"
    text += f", nvcc {facts['nvcc']}" if "nvcc" in facts else ""
    text += f", Python {facts.get('python')}; {facts.get('date')}.\n"
    if report.get("short"):
        text += "\nThis was a rehearsal with tiny sizes and a few tests: the figures say nothing.\n"
    missing = report.get("missing", [])
    if missing:
        text += "\nMissing on this machine:\n\n" + "".join(f"- {sentence}\n" for sentence in missing)
    return text


def _parts(report: dict[str, Any]) -> str:
    rows = [
        [part["title"], part["status"], f"{part['seconds']:.0f}", part.get("reason", "")]
        for part in report.get("parts", [])
    ]
    return "\n" + table(["part", "result", "seconds", "reason"], rows)


def _build(result: dict[str, Any]) -> str:
    slowest = ", ".join(f"`{name}` {seconds:.0f} s" for name, seconds in result.get("slowest", [])[:5])
    return (
        f"For {result['architecture']}, {result['jobs']} jobs: configuration {result['configure_seconds']:.0f} s, "
        f"compilation {result['build_seconds']:.0f} s. The longest compilations: {slowest}.\n"
    )


def _smoke(result: dict[str, Any]) -> str:
    rows = result["calls"]
    wrong = [row for row in rows if not row["ok"]]
    text = (
        f"{len(rows) - len(wrong)} of {len(rows)} calls agree: values and gradients, relative to the largest value of "
        "each tensor.\n"
    )
    worst: dict[tuple[str, str], float] = {}
    for row in rows:
        if row["ok"]:
            key = row["operator"], row["dtype"]
            worst[key] = max(worst.get(key, 0.0), row["error"])
    dtypes = sorted({dtype for _, dtype in worst})
    operators = sorted({name for name, _ in worst})
    cells = [
        [f"`{name}`", *(f"{worst[name, d]:.1e}" if (name, d) in worst else "" for d in dtypes)] for name in operators
    ]
    text += "\nThe largest errors:\n\n" + table(["operator", *dtypes], cells)
    if wrong:
        cells = [
            [f"`{row['operator']}`", row["dtype"], row.get("message", f"error {row.get('error')}")] for row in wrong
        ]
        text += "\nCalls that do not agree:\n\n" + table(["operator", "dtype", "error"], cells)
    return text


def _tests(result: dict[str, Any]) -> str:
    text = (
        f"{result['passed']} tests passed, {result['failed']} failed, {result['skipped']} were skipped and "
        f"{result['not_run']} did not run in the time; {result['selected']} were selected.\n"
    )
    if result["failures"]:
        cells = [
            [f"`{each['id']}`", (each["text"].strip().splitlines() or [""])[-1][:200]] for each in result["failures"]
        ]
        text += "\n" + table(["failed test", "last line"], cells)
    return text


def _kernels(result: dict[str, Any]) -> str:
    text = f"{result.get('tokens')} tokens, {result.get('dtype')} (`python benchmarks/kernels_cuda.py`).\n"
    for model, rows in result["results"].items():
        cells = [
            [name, f"{row['gigabytes_per_second']:.0f}", f"{row['of_copy']:.2f}"]
            for name, row in rows["kernels"].items()
        ]
        text += f"\n{model}:\n\n" + table(["kernel", "GB/s", "of a copy"], cells)
        operators = rows.get("operators", {})
        cells = [
            [name, f"{row['weft_ms']:.3f}", f"{row['torch_ms']:.3f}", f"{row['torch_over_weft']:.2f}"]
            for name, row in operators.items()
        ]
        text += "\n" + table(["operator, forward and backward", "weft, ms", "torch, ms", "torch / weft"], cells)
        if "column_row_mlp" in rows:
            cells = [[name, f"{value:.3f}"] for name, value in rows["column_row_mlp"].items()]
            text += "\n" + table(["feed-forward", "ms, or ratio"], cells)
    return text


def _candidates(result: dict[str, Any]) -> str:
    text = "The first way of each job is weft's (`python benchmarks/cuda_candidates.py`).\n\n"
    cells = []
    for group, jobs in result["groups"].items():
        if "problem" in jobs:
            cells.append([group, "", jobs["problem"], "", ""])
            continue
        for job, ways in jobs.items():
            if "problem" in ways:
                cells.append([group, job, ways["problem"], "", ""])
                continue
            cells += [
                [group, job, way, f"{row['ms']:.3f}", f"{row['first_over_this']:.2f}"] for way, row in ways.items()
            ]
    return text + table(["group", "job", "way", "ms", "first / this"], cells)


def _memory(result: dict[str, Any]) -> str:
    ranks = sorted({row["num_ranks"] for row in result["results"]})
    columns: dict[tuple[str, str], dict[int, int]] = {}
    for row in result["results"]:
        columns.setdefault((row["workload"], row["column"]), {})[row["num_ranks"]] = row["peak_bytes"]
    cells = [
        [workload, column, *(f"{sizes[n] / 1e9:.3f}" if n in sizes else "" for n in ranks)]
        for (workload, column), sizes in columns.items()
    ]
    text = (
        "Peak GB of allocated device memory of rank 0, the other ranks simulated (`python benchmarks/memory.py`).\n\n"
    )
    text += table(["workload", "column", *(f"{n} rank{'' if n == 1 else 's'}" for n in ranks)], cells)
    if result.get("failed"):
        text += "\n" + table(
            ["failed row", "error"], [[each["row"], each["error"][-200:]] for each in result["failed"]]
        )
    return text


def _step(result: dict[str, Any]) -> str:
    cells = [
        [
            name,
            f"{row['milliseconds']:.2f}",
            f"{row['eager_over_this']:.3f}",
            f"{row['tokens_per_second']:.0f}",
            f"{row['peak_bytes'] / 1e9:.2f}",
            row.get("launches", ""),
        ]
        for name, row in result["variants"].items()
    ]
    text = (
        f"{result['blocks']} blocks of {result['model']}, {result['tokens']} tokens, {result['dtype']}: "
        "forward, backward and AdamW (`python benchmarks/block_step.py`). The ratio is the median of pairs.\n\n"
    )
    text += table(["variant", "ms", "eager / this", "tokens/s", "peak GB of a step", "kernels"], cells)
    for name, row in result["variants"].items():
        if row.get("longest_kernels"):
            cells = [[f"`{each['name']}`", f"{each['ms']:.3f}", each["calls"]] for each in row["longest_kernels"]]
            text += f"\nKernels of a step, {name}:\n\n" + table(["kernel", "ms", "calls"], cells)
    for name, message in result.get("failed", {}).items():
        text += f"\n{name} failed: {message}\n"
    return text


def _sanitizer(result: dict[str, Any]) -> str:
    text = f"{result['calls']} calls of kernels ended; {result['errors']} errors were reported.\n"
    for line in result.get("messages", []):
        text += f"\n    {line}"
    return text + "\n" if result.get("messages") else text


_RENDERERS: dict[str, Callable[[dict[str, Any]], str]] = {
    "build": _build,
    "smoke": _smoke,
    "tests": _tests,
    "nccl": _tests,
    "kernels": _kernels,
    "candidates": _candidates,
    "memory": _memory,
    "step": _step,
    "memcheck": _sanitizer,
    "racecheck": _sanitizer,
}
