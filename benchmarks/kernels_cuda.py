"""The kernels of one device: bandwidth against a copy, and the fused feed-forward against eager and torch.compile.

    python benchmarks/kernels_cuda.py [--json] [--check]
    python benchmarks/kernels_cuda.py --device cpu --tokens 256 --models tiny    # the same on a CPU

A kernel's bytes are those that it must read and write once. Its bandwidth is divided by that of a `copy_` which reads
and writes as many bytes in sum, measured in turn with the kernel. The feed-forward is SwiGLU, forward and backward with
gradients of input and weights, on one rank. Times are medians; on a GPU, CUDA events measure them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from common import machine_facts
from torch import Tensor

import weft

OPS = torch.ops.weft
MODELS = {"tiny": (64, 176), "llama-7b": (4096, 11008), "llama-70b": (8192, 28672)}  # model dim, hidden dim
COPY_SHARE = 0.85  # the least share of a copy's bandwidth that --check requires of every kernel
COMPILED_SHARE = 1.0  # the least ratio of torch.compile's time to weft's that --check requires


def kernels(tokens: int, dim: int, hidden: int, options: dict[str, Any]) -> dict[str, tuple[int, Callable[[], object]]]:
    """Return (number of elements read and written, call) for each kernel, by name."""
    h, g, up = (torch.randn(tokens, hidden, **options) for _ in range(3))
    x, y, z = (torch.randn(tokens, dim, **options) for _ in range(3))
    weight, bias = (torch.randn(dim, **options) for _ in range(2))
    seed = torch.tensor([7])
    _, _, *mean_rstd = OPS._norm(x, None, weight, bias, True, 1e-5)
    *_, rstd = OPS._norm(x, None, weight, None, False, 1e-6)
    empty = rstd.new_empty(0)
    wide, narrow = tokens * hidden, tokens * dim
    return {
        "gelu": (2 * wide, lambda: OPS._activation(h, "gelu")),
        "gelu backward": (4 * wide, lambda: OPS._activation_backward(g, h, "gelu")),
        "swiglu": (3 * wide, lambda: OPS._gated_activation(h, up, "silu")),
        "swiglu backward": (6 * wide, lambda: OPS._gated_activation_backward(g, h, up, "silu")),
        "rms_norm": (2 * narrow, lambda: OPS._norm(x, None, weight, None, False, 1e-6)),
        "rms_norm backward": (
            3 * narrow,
            lambda: OPS._norm_backward(y, None, x, weight, empty, rstd, False, True, 1),
        ),
        "add_rms_norm": (4 * narrow, lambda: OPS._norm(x, y, weight, None, False, 1e-6)),
        "add_rms_norm backward": (
            4 * narrow,
            lambda: OPS._norm_backward(y, z, x, weight, empty, rstd, False, True, 1),
        ),
        "layer_norm": (2 * narrow, lambda: OPS._norm(x, None, weight, bias, True, 1e-5)),
        "layer_norm backward": (
            3 * narrow,
            lambda: OPS._norm_backward(y, None, x, weight, *mean_rstd, True, True, 2),
        ),
        "dropout": (2 * narrow, lambda: OPS.dropout(x, seed, p=0.1, group_name="")),
    }


def feed_forwards(tokens: int, dim: int, hidden: int, options: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """Return, for each variant, a call that runs its forward and backward; check that all give the same gradients."""
    x = torch.randn(tokens, dim, **options).requires_grad_()
    w1, w3 = (torch.randn(hidden, dim, **options).mul_(dim**-0.5).requires_grad_() for _ in range(2))
    w2 = torch.randn(dim, hidden, **options).mul_(hidden**-0.5).requires_grad_()
    grad = torch.randn(tokens, dim, **options)
    leaves = (x, w1, w2, w3)

    def plain(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
        return F.linear(F.silu(F.linear(x, w1)) * F.linear(x, w3), w2)

    def fused(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
        return weft.ops.column_row_mlp(x, w1, w2, w3, activation="silu", group_name="")

    compiled = torch.compile(plain)

    def step(forward: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(forward(*leaves), leaves, grad)

    steps = {"weft": lambda: step(fused), "eager": lambda: step(plain), "compiled": lambda: step(compiled)}
    expected = steps["eager"]()
    for name in ("weft", "compiled"):
        for actual, gradient in zip(steps[name](), expected, strict=True):
            torch.testing.assert_close(actual, gradient, rtol=0.05, atol=0.05 * gradient.abs().max().item())
    return steps


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def medians(calls: dict[str, Callable[[], object]], device: torch.device, num_samples: int) -> dict[str, float]:
    """Return the median seconds of each call, sampled in turn after two warm-up calls."""
    for call in calls.values():
        call()
        call()
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(num_samples):
        for name, call in calls.items():
            samples[name].append(seconds_of(call, device))
    return {name: statistics.median(times) for name, times in samples.items()}


def measure(model: str, tokens: int, device: torch.device, num_samples: int) -> dict[str, Any]:
    torch.manual_seed(0)
    dim, hidden = MODELS[model]
    options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    rows: dict[str, Any] = {}
    for name, (num_elements, call) in kernels(tokens, dim, hidden, options).items():
        num_bytes = 2 * num_elements
        source, target = (torch.empty(num_bytes // 2, dtype=torch.uint8, device=device) for _ in range(2))
        pair = {"kernel": call, "copy": lambda to=target, of=source: to.copy_(of)}
        seconds = medians(pair, device, num_samples)
        rows[name] = {
            "gigabytes_per_second": round(num_bytes / seconds["kernel"] / 1e9, 1),
            "of_copy": round(seconds["copy"] / seconds["kernel"], 3),
        }
    steps = medians(feed_forwards(tokens, dim, hidden, options), device, num_samples)
    milliseconds = {name: round(value * 1e3, 3) for name, value in steps.items()}
    ratios = {f"{name}_over_weft": round(steps[name] / steps["weft"], 3) for name in ("eager", "compiled")}
    return {"kernels": rows, "column_row_mlp": milliseconds | ratios}


def failures(results: dict[str, Any]) -> list[str]:
    """Return the limits that are missed, one sentence each."""
    violations = []
    for model, rows in results.items():
        for name, row in rows["kernels"].items():
            if row["of_copy"] < COPY_SHARE:
                violations.append(f"{model}, {name}: {row['of_copy']} of a copy's bandwidth, wanted {COPY_SHARE}.")
        ratio = rows["column_row_mlp"]["compiled_over_weft"]
        if ratio < COMPILED_SHARE:
            violations.append(
                f"{model}, column_row_mlp: torch.compile takes {ratio} of its time, wanted {COMPILED_SHARE}."
            )
    return violations


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help="cuda, or cpu")
    parser.add_argument("--tokens", type=int, default=8192, help="rows of every activation")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["llama-7b", "llama-70b"], help="their shapes")
    parser.add_argument("--samples", type=int, default=21, help="of which a time is the median")
    parser.add_argument("--json", action="store_true", help="print one JSON object, not a table")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a limit is missed")
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("kernels_cuda: got no CUDA device; run it where there is one, or pass --device cpu.", file=sys.stderr)
        return 2
    results = {model: measure(model, args.tokens, device, args.samples) for model in args.models}
    if args.json:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        facts = {"machine": machine_facts(), "device": name, "tokens": args.tokens, "dtype": "bfloat16"}
        print(json.dumps({"benchmark": "kernels_cuda", **facts, "results": results}, indent=2))
    else:
        for model, rows in results.items():
            print(f"{model}: {'kernel':<24} {'GB/s':>8} {'of a copy':>10}")
            for kernel, row in rows["kernels"].items():
                print(f"{'':<{len(model) + 2}}{kernel:<24} {row['gigabytes_per_second']:>8.1f} {row['of_copy']:>10.3f}")
            print(f"{'':<{len(model) + 2}}column_row_mlp, ms: {rows['column_row_mlp']}")
    violations = failures(results) if args.check else []
    for sentence in violations:
        print(sentence, file=sys.stderr)
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
