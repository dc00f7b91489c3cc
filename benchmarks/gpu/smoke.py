"""Compares every operator, and every kernel by itself, on a device with float64 on the CPU: values and gradients.

Optimizer steps and conversions of their formats, which have no float64, are compared with their kernels on the CPU.

    PYTHONPATH=benchmarks python -m gpu.smoke [--device cpu] [--short] [--output FILE]

An error is the largest difference of a tensor, relative to its largest absolute value or to 1, if that is larger. The
operators' calls are those of tests/ops/operators.py; the arguments are rounded to the dtype first, so that both sides
compute from equal numbers.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpu.kernel_calls import KernelCall, kernel_calls

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from ops.operators import Call, sample_calls

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 6e-3}


def moved(value: object, device: str, dtype: torch.dtype, stays: bool = False) -> object:
    """Return a tensor, or a list of tensors, on a device; floating-point tensors as leaves of this dtype.

    `stays`: whether other tensors stay on their present device.
    """
    if isinstance(value, list):
        return [moved(each, device, dtype, stays) for each in value]
    if not isinstance(value, Tensor):
        return value
    if not value.is_floating_point():
        return value if stays else value.to(device)
    return value.detach().to(device, dtype).requires_grad_(value.requires_grad)


def leaves_of(values: tuple[object, ...]) -> list[Tensor]:
    flat = [each for value in values for each in (value if isinstance(value, list) else [value])]
    return [each for each in flat if isinstance(each, Tensor) and each.requires_grad]


def run_operator(call: Call, args: tuple[object, ...]) -> list[Tensor]:
    """Return the results, and the arguments' gradients from results' gradients that are exact in every dtype."""
    y = call.op(*args, **call.kwargs)
    results = [each for each in ([y] if isinstance(y, Tensor) else y) if each.is_floating_point()]
    grads = [(torch.arange(each.numel()) % 5 - 2).reshape(each.shape).to(each) for each in results]
    gradients = torch.autograd.grad(results, leaves_of(args), grads, allow_unused=True)
    return [*(each.detach() for each in results), *(each for each in gradients if each is not None)]


def error_of(actual: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest error of all tensors; NaN and a wrong number or shape of tensors count as infinite."""
    if [each.shape for each in actual] != [each.shape for each in expected]:
        return float("inf")
    errors = [0.0]
    for a, b in zip(actual, expected, strict=True):
        if b.numel():
            difference = (a.double().cpu() - b.double()).abs().max().item() / max(1.0, b.abs().max().item())
            errors.append(float("inf") if math.isnan(difference) else difference)
    return max(errors)


def operator_errors(device: str, dtypes: list[torch.dtype]) -> Iterator[tuple[str, torch.dtype, Any]]:
    """Yield (operator, dtype, a function that returns its error) for each sample call."""
    torch.manual_seed(0)
    for call in sample_calls():
        stays = call.name == "dropout"  # its seed is read on the CPU
        for dtype in dtypes:

            def error(call: Call = call, dtype: torch.dtype = dtype, stays: bool = stays) -> float:
                rounded = tuple(moved(moved(arg, "cpu", dtype), "cpu", torch.float64) for arg in call.args)
                expected = run_operator(call, rounded)
                return error_of(
                    run_operator(call, tuple(moved(arg, device, dtype, stays) for arg in rounded)), expected
                )

            yield call.name, dtype, error


def kernel_errors(device: str, dtypes: list[torch.dtype]) -> Iterator[tuple[str, torch.dtype, Any]]:
    """Yield the same for each kernel of one device."""
    for dtype in dtypes:
        for call in kernel_calls(dtype):

            def error(call: KernelCall = call) -> float:
                return error_of(call.run(device), call.run("cpu", torch.float64))

            yield call.name, dtype, error


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help="cuda, or cpu")
    parser.add_argument("--short", action="store_true", help="float32 only")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the results as JSON after every call")
    args = parser.parse_args()
    dtypes = [torch.float32] if args.short else list(TOLERANCES)
    rows: list[dict[str, Any]] = []
    for name, dtype, error in [*operator_errors(args.device, dtypes), *kernel_errors(args.device, dtypes)]:
        row: dict[str, Any] = {"operator": name, "dtype": str(dtype).removeprefix("torch.")}
        try:
            row["error"] = error()
            row["ok"] = row["error"] <= TOLERANCES[dtype]
            if not row["ok"]:
                row |= {"error": str(row["error"]), "message": f"error {row['error']}, limit {TOLERANCES[dtype]}"}
        except Exception as problem:  # the other operators still run
            row |= {"ok": False, "message": f"{type(problem).__name__}: {problem}"[:500]}
        rows.append(row)
        if args.output is not None:
            args.output.write_text(json.dumps({"device": args.device, "calls": rows}))
    wrong = [row for row in rows if not row["ok"]]
    for row in wrong:
        print(f"{row['operator']} {row['dtype']}: {row['message']}")
    print(f"{len(rows) - len(wrong)} of {len(rows)} calls agree with float64 on the CPU.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
