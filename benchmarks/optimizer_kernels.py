"""Nanoseconds per element of weft's optimizer steps, by format, against torch's fused AdamW in float32.

    python benchmarks/optimizer_kernels.py [--sets 3] [--samples 9] [--json] [--check]

Each set is a fresh process with one thread, in which the candidates are timed in turn. Shapes: `weight`, a 4096 x 4096
weight in one call; `row_blocks`, the same weight in calls of 64 rows, 1 MiB in float32, as a step in the backward makes
them; `cached`, 64 rows again and again, which stay in the caches, so that the arithmetic limits the speed. A candidate
is named after its parameter, gradient and states; `split16` and `split8` are bfloat16 parameters with low_bits.

Figures are medians of the sets' medians, of wall time and of the thread's CPU time, and the median over all samples of
the ratio to torch's sample of the same turn. --check compares the ratios of CPU time of `weight` and `row_blocks` with
the limit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from common import machine_facts
from process_sets import ProcessSet
from torch import Tensor

import weft

MAX_RATIO = 1.15
SIZE, BLOCK_ROWS = 4096, 64
REFERENCE = "torch"
HYPERPARAMETERS = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "eps": 1e-8, "maximize": False}
# (parameter, gradient, states)
ADAM = (
    ("float32", "float32", "float32"),
    ("float32", "float32", "bfloat16"),
    ("float32", "float32", "codes"),
    ("bfloat16", "bfloat16", "float32"),
    ("bfloat16", "bfloat16", "bfloat16"),
    ("bfloat16", "bfloat16", "codes"),
    ("split16", "bfloat16", "float32"),
    ("split16", "bfloat16", "bfloat16"),
    ("split16", "bfloat16", "codes"),
    ("split16", "float32", "codes"),
    ("split8", "bfloat16", "codes"),
)
MOMENTUM = (("float32", "float32", "codes"), ("split16", "bfloat16", "codes"))
Step = Callable[[int], None]


def _state(rows: int, kind: str, is_signed: bool) -> tuple[Tensor, Tensor | None]:
    if kind != "codes":
        return torch.zeros(rows, SIZE, dtype=getattr(torch, kind)), None
    return torch.zeros(rows, SIZE, dtype=torch.int8 if is_signed else torch.uint8), torch.zeros(rows, SIZE // 256)


def _reference(rows: int, rows_per_call: int) -> Step:
    tensors = [torch.randn(rows, SIZE), torch.randn(rows, SIZE), torch.zeros(rows, SIZE), torch.zeros(rows, SIZE)]
    calls = list(zip(*(tensor.split(rows_per_call) for tensor in tensors), strict=True))
    options = {**HYPERPARAMETERS, "amsgrad": False}

    def step(number: int) -> None:
        count = torch.tensor(float(number))
        for parameter, grad, exp_avg, exp_avg_sq in calls:
            torch._fused_adamw_([parameter], [grad], [exp_avg], [exp_avg_sq], [], [count], **options)

    return step


def _candidate(rows: int, rows_per_call: int, formats: tuple[str, str, str], is_adam: bool) -> Step:
    weights, grads, states = formats
    parameter, low_bits = torch.randn(rows, SIZE), None
    if weights.startswith("split"):
        parameter, low_bits = weft.ops.split_float(parameter, torch.int16 if weights == "split16" else torch.int8)
    parameter = parameter.to(torch.float32 if weights == "float32" else torch.bfloat16)
    grad = torch.randn(rows, SIZE).to(getattr(torch, grads))
    made = [_state(rows, states, is_signed) for is_signed in ((True, False) if is_adam else (True,))]
    tensors = [parameter, grad, *(each for state in made for each in state), low_bits]
    count = -(-rows // rows_per_call)
    calls = list(zip(*([None] * count if each is None else each.split(rows_per_call) for each in tensors), strict=True))
    place = {"seed": 1, "column": 0, "full_columns": SIZE}
    if is_adam:
        options = {**HYPERPARAMETERS, **place, "decoupled_weight_decay": True}
        op = torch.ops.weft.adam_step_
    else:
        options = {"lr": 1e-3, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.01, "nesterov": False}
        options |= {"maximize": False, **place}
        op = torch.ops.weft.momentum_step_

    def step(number: int) -> None:
        for index, call in enumerate(calls):
            op(*call, step=number, row=index * rows_per_call, **options)

    return step


def _candidates(rows: int, rows_per_call: int) -> dict[str, Step]:
    steps = {REFERENCE: _reference(rows, rows_per_call)}
    for name, list_of_formats in (("adam", ADAM), ("momentum", MOMENTUM)):
        for formats in list_of_formats:
            steps[f"{name} {' '.join(formats)}"] = _candidate(rows, rows_per_call, formats, name == "adam")
    return steps


def _measure(connection: Connection, num_samples: int) -> None:
    """Answer a shape's name with, for each candidate, the (wall, CPU) nanoseconds per element of each sample."""
    shapes = {"weight": (SIZE, SIZE, 1), "row_blocks": (SIZE, BLOCK_ROWS, 1), "cached": (BLOCK_ROWS, BLOCK_ROWS, 32)}
    torch.manual_seed(0)
    while True:
        rows, rows_per_call, repeats = shapes[connection.recv()]
        steps = _candidates(rows, rows_per_call)
        samples: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
        number = 0
        for turn in range(num_samples + 1):
            for name, step in steps.items():
                begin = time.perf_counter(), time.thread_time()
                for _ in range(repeats):
                    number += 1
                    step(number)
                seconds = time.perf_counter() - begin[0], time.thread_time() - begin[1]
                if turn > 0:  # the first is a warm-up
                    wall, cpu = (1e9 * each / (repeats * rows * SIZE) for each in seconds)
                    samples[name].append((wall, cpu))
        connection.send(samples)


def _summary(sets: list[dict[str, list[tuple[float, float]]]]) -> list[dict[str, Any]]:
    """Return the row of each candidate."""
    rows = []
    for name in sets[0]:
        row: dict[str, Any] = {"candidate": name}
        for index, clock in enumerate(("wall", "cpu")):
            medians = [statistics.median(sample[index] for sample in samples[name]) for samples in sets]
            pairs = [pair for samples in sets for pair in zip(samples[name], samples[REFERENCE], strict=True)]
            row[f"{clock}_ns"] = round(statistics.median(medians), 3)
            row[f"{clock}_ratio"] = round(statistics.median(mine[index] / torchs[index] for mine, torchs in pairs), 3)
            row[f"{clock}_ns_of_sets"] = [round(median, 3) for median in medians]
        rows.append(row)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", type=int, default=3, help="fresh processes (default 3)")
    parser.add_argument("--samples", type=int, default=9, help="samples of each candidate in a process (default 9)")
    parser.add_argument("--shapes", nargs="+", default=["weight", "row_blocks", "cached"], help="default: all three")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--check", action="store_true", help=f"fail if a ratio of CPU time exceeds {MAX_RATIO}")
    options = parser.parse_args()
    measured: dict[str, list[dict[str, list[tuple[float, float]]]]] = {shape: [] for shape in options.shapes}
    for _ in range(options.sets):
        processes = ProcessSet(_measure, 1, "gloo", options.samples)
        try:
            for shape, sets in measured.items():
                sets.extend(processes.request(shape))
        finally:
            processes.close()
    rows = {shape: _summary(sets) for shape, sets in measured.items()}
    if options.json:
        facts = {"benchmark": "optimizer_kernels", "sets": options.sets, "samples": options.samples}
        print(json.dumps({**facts, "machine": machine_facts(), "shapes": rows}, indent=2))
    else:
        for shape, rows_of_shape in rows.items():
            print(f"{shape:<36} wall ns  ratio   CPU ns  ratio")
            for row in rows_of_shape:
                figures = [row[key] for key in ("wall_ns", "wall_ratio", "cpu_ns", "cpu_ratio")]
                print(f"{row['candidate']:<36}" + "".join(f"{figure:8.3f}" for figure in figures))
    slow = [
        f"{shape}, {row['candidate']}: {row['cpu_ratio']} times torch's CPU time, expected at most {MAX_RATIO}"
        for shape in options.shapes
        if shape != "cached"
        for row in rows[shape]
        if row["cpu_ratio"] > MAX_RATIO
    ]
    if options.check and slow:
        print("\n".join(slow), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
