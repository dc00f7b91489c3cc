"""The kernels of one device: bandwidth against a copy, and the fused feed-forward against eager and torch.compile.

    python benchmarks/kernels_cuda.py [--json] [--check]
    python benchmarks/kernels_cuda.py --device cpu --tokens 256 --models tiny    # the same on a CPU

A kernel's bytes are those that it must read and write once. Its bandwidth is divided by that of a `copy_` which reads
and writes as many bytes in sum, measured in turn with the kernel. Operators are compared with torch's, forward and
backward. The feed-forward is SwiGLU, forward and backward with gradients of input and weights, on one rank; `predicted`
is what the ratio of eager to weft would be if each pass took as long as its matrix products, measured alone, and a copy
of the bytes of its activations.

Times are medians. On a GPU, CUDA events measure them. A spin kernel, which runs longer than the host needs to launch a
sample, precedes each sample, so that the device never waits for a launch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import machine_facts
from torch import Tensor

import weft

OPS = torch.ops.weft
# Model dim, hidden dim, classes.
MODELS = {"tiny": (64, 176, 320), "llama-7b": (4096, 11008, 32000), "llama-70b": (8192, 28672, 128256)}
COPY_SHARE = 0.85  # the least share of a copy's bandwidth that --check requires of every kernel
TORCH_SHARE = 1.0  # the least ratio of the time of torch's operators, and of torch.compile, to weft's for --check
# Activations that the feed-forward reads or writes outside of its matrix products: weft's gated kernels, and eager's
# silu and product. A matrix product also reads its operands and writes its result, the same in both.
WEFT_PASSES, EAGER_PASSES = 3 + 6, (2 + 3) + (3 + 3 + 3)
SPINS_PER_SECOND = 2_000_000_000  # at least the clock rate of a GPU, in Hz


def kernels(tokens: int, dim: int, hidden: int, options: dict[str, Any]) -> dict[str, tuple[int, Callable[[], object]]]:
    """Return (number of elements read and written, call) for each kernel, by name."""
    h, g, up = (torch.randn(tokens, hidden, **options) for _ in range(3))
    h_up = torch.cat([h, up], -1)
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
        "joined swiglu": (3 * wide, lambda: OPS._gate_up_activation(h_up, "silu")),
        "joined swiglu backward": (6 * wide, lambda: OPS._gate_up_activation_backward(g, h_up, "silu")),
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


def against_torch(
    tokens: int, dim: int, hidden: int, classes: int, options: dict[str, Any]
) -> dict[str, dict[str, Callable[[], object]]]:
    """Return, by the name of an operator, a call of weft's and of torch's forward and backward."""
    x, grad = (torch.randn(tokens, dim, **options) for _ in range(2))
    h, grad_h = (torch.randn(tokens, hidden, **options) for _ in range(2))
    weight, bias = (torch.randn(dim, **options).requires_grad_() for _ in range(2))
    logits = torch.randn(tokens, classes, **options).requires_grad_()
    target = torch.randint(classes, (tokens,), device=options["device"])
    x.requires_grad_()

    def step(forward: Callable[[], Tensor], leaves: list[Tensor], grad: Tensor | None = None) -> Callable[[], object]:
        return lambda: torch.autograd.grad(forward(), leaves, grad)

    ops = weft.ops
    return {
        "rms_norm": {
            "weft": step(lambda: ops.rms_norm(x, weight, group_name="", eps=1e-6), [x, weight], grad),
            "torch": step(lambda: F.rms_norm(x, (dim,), weight, 1e-6), [x, weight], grad),
        },
        "layer_norm": {
            "weft": step(lambda: ops.layer_norm(x, weight, bias, group_name=""), [x, weight, bias], grad),
            "torch": step(lambda: F.layer_norm(x, (dim,), weight, bias), [x, weight, bias], grad),
        },
        "gelu": {
            "weft": lambda: (OPS._activation(h, "gelu"), OPS._activation_backward(grad_h, h, "gelu")),
            # weft's backward also returns the activation, which torch would keep from the forward.
            "torch": lambda: (F.gelu(h), torch.ops.aten.gelu_backward(grad_h, h), F.gelu(h)),
        },
        "cross_entropy": {
            "weft": step(lambda: ops.vocab_parallel_cross_entropy(logits, target, 0, group_name=""), [logits]),
            "torch": step(lambda: F.cross_entropy(logits, target), [logits]),
        },
    }


def products(tokens: int, dim: int, hidden: int, options: dict[str, Any]) -> Callable[[], object]:
    """Return a call of the nine matrix products of a feed-forward and its backward."""
    narrow, wide = torch.randn(tokens, dim, **options), torch.randn(tokens, hidden, **options)
    w1, w2 = torch.randn(hidden, dim, **options), torch.randn(dim, hidden, **options)

    def call() -> list[Tensor]:
        forward = [narrow @ w1.t(), narrow @ w1.t(), wide @ w2.t()]
        inputs = [narrow @ w2, wide @ w1, wide @ w1]
        return forward + inputs + [wide.t() @ narrow, wide.t() @ narrow, narrow.t() @ wide]

    return call


def feed_forwards(
    tokens: int, dim: int, hidden: int, options: dict[str, Any]
) -> tuple[dict[str, Callable[[], object]], str | None]:
    """Return, for each variant, a call that runs its forward and backward; check that all give the same gradients.

    The second result says why the variant "compiled" is left out, if torch.compile fails.
    """
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

    joined = tuple(leaf.detach().clone().requires_grad_() for leaf in leaves)
    weft.nn.join_gate_up(joined[1], joined[3])
    steps = {
        "weft": lambda: step(fused),
        "weft_joined": lambda: torch.autograd.grad(fused(*joined), joined, grad),
        "eager": lambda: step(plain),
        "compiled": lambda: step(compiled),
    }
    problem = None
    try:
        steps["compiled"]()
    except Exception as error:  # for example, Triton finds no C compiler; the other variants are still measured
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
        del steps["compiled"]
    expected = steps["eager"]()
    for call in steps.values():
        for actual, gradient in zip(call(), expected, strict=True):
            torch.testing.assert_close(actual, gradient, rtol=0.05, atol=0.05 * gradient.abs().max().item())
    return steps, problem


def seconds_of(call: Callable[[], object], device: torch.device, host_seconds: float) -> float:
    """Return the seconds that a call takes on the device; `host_seconds`: what the host needs to launch it."""
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(int((2 * host_seconds + 1e-4) * SPINS_PER_SECOND))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def medians(calls: dict[str, Callable[[], object]], device: torch.device, num_samples: int) -> dict[str, float]:
    """Return the median seconds of each call, sampled in turn after two warm-up calls."""
    host_seconds = {}
    for name, call in calls.items():
        call()
        start = time.perf_counter()
        call()
        host_seconds[name] = time.perf_counter() - start
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(num_samples):
        for name, call in calls.items():
            samples[name].append(seconds_of(call, device, host_seconds[name]))
    return {name: statistics.median(times) for name, times in samples.items()}


def measure(model: str, tokens: int, device: torch.device, num_samples: int) -> Iterator[dict[str, Any]]:
    """Yield the results of kernels, then with those of operators, then with those of the feed-forward."""
    torch.manual_seed(0)
    dim, hidden, classes = MODELS[model]
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
    results: dict[str, Any] = {"kernels": rows, "operators": {}}
    yield results
    operators = results["operators"]
    for name, pair in against_torch(tokens, dim, hidden, classes, options).items():
        seconds = medians(pair, device, num_samples)
        operators[name] = {f"{side}_ms": round(value * 1e3, 3) for side, value in seconds.items()}
        operators[name]["torch_over_weft"] = round(seconds["torch"] / seconds["weft"], 3)
    yield results
    results["column_row_mlp"] = measure_feed_forward(tokens, dim, hidden, options, num_samples)
    yield results


def measure_feed_forward(
    tokens: int, dim: int, hidden: int, options: dict[str, Any], num_samples: int
) -> dict[str, Any]:
    """Return the milliseconds of each variant, their ratios to weft's, and the ratio that bytes predict for eager."""
    source, target = (torch.empty(tokens, hidden, **options) for _ in range(2))
    variants, problem = feed_forwards(tokens, dim, hidden, options)
    calls = {
        **variants,
        "products": products(tokens, dim, hidden, options),
        "copy": lambda: target.copy_(source),
    }
    seconds = medians(calls, options["device"], num_samples)
    pass_seconds = seconds.pop("copy") / 2  # a copy reads and writes an activation
    predicted = {
        name: seconds["products"] + passes * pass_seconds
        for name, passes in (("weft", WEFT_PASSES), ("eager", EAGER_PASSES))
    }
    return {
        **{name: round(value * 1e3, 3) for name, value in seconds.items()},
        **{f"{name}_over_weft": round(seconds[name] / seconds["weft"], 3) for name in variants if name != "weft"},
        **({} if problem is None else {"compiled_problem": problem}),
        "predicted_eager_over_weft": round(predicted["eager"] / predicted["weft"], 3),
    }


def failures(results: dict[str, Any]) -> list[str]:
    """Return the limits that are missed, one sentence each."""
    violations = []
    for model, rows in results.items():
        for name, row in rows["kernels"].items():
            if row["of_copy"] < COPY_SHARE:
                violations.append(
                    f"{model}, {name}: {row['of_copy']} of a copy's bandwidth, wanted at least {COPY_SHARE}."
                )
        ratios = {name: row["torch_over_weft"] for name, row in rows["operators"].items()}
        if "compiled_problem" in rows["column_row_mlp"]:
            violations.append(f"{model}, column_row_mlp: torch.compile failed: {rows['column_row_mlp']}.")
        else:
            ratios["column_row_mlp"] = rows["column_row_mlp"]["compiled_over_weft"]
        for name, ratio in ratios.items():
            if ratio < TORCH_SHARE:
                violations.append(f"{model}, {name}: torch's time / weft's is {ratio}, wanted at least {TORCH_SHARE}.")
    return violations


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help="cuda, or cpu")
    parser.add_argument("--tokens", type=int, default=8192, help="rows of every activation")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["llama-7b", "llama-70b"], help="shapes")
    parser.add_argument("--samples", type=int, default=21, help="samples of which a time is the median")
    parser.add_argument("--json", action="store_true", help="print one JSON object, not a table")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the JSON there after every section, too")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a limit is missed")
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("kernels_cuda: got no CUDA device; run it where there is one, or pass --device cpu.", file=sys.stderr)
        return 2
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    facts = {"machine": machine_facts(), "device": name, "tokens": args.tokens, "dtype": "bfloat16"}
    results: dict[str, Any] = {}
    report = {"benchmark": "kernels_cuda", **facts, "results": results}
    for model in args.models:
        for rows in measure(model, args.tokens, device, args.samples):
            results[model] = rows
            if args.output is not None:
                args.output.write_text(json.dumps(report, indent=2))
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        for model, rows in results.items():
            print(f"{model}: {'kernel':<24} {'GB/s':>8} {'of a copy':>10}")
            for kernel, row in rows["kernels"].items():
                print(f"{'':<{len(model) + 2}}{kernel:<24} {row['gigabytes_per_second']:>8.1f} {row['of_copy']:>10.3f}")
            for name in ("operators", "column_row_mlp"):
                print(f"{'':<{len(model) + 2}}{name}: {rows[name]}")
    violations = failures(results) if args.check else []
    for sentence in violations:
        print(sentence, file=sys.stderr)
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
