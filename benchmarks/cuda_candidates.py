"""Measures several ways to compute the same result on one device: the figures behind the decisions in docs/cuda.md.

    python benchmarks/cuda_candidates.py [--groups NAME ...] [--samples 11] [--json] [--output FILE]
    python benchmarks/cuda_candidates.py --device cpu --scale 64    # the same code on a CPU, with small sizes

Each group has one or more jobs, and each job several ways to compute its result; the first way is weft's. The results
of all ways of a job must have the same norm; ways may differ in layout. Times are medians of samples taken in turn, as
in kernels_cuda.py, without the host's launches; `host_ms` is the time that the host needs to launch the way once.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import machine_facts
from kernels_cuda import medians
from torch import Tensor

import weft

Ways = dict[str, Callable[[], object]]
OPS = torch.ops.weft


class Sizes:
    """Creates random bfloat16 tensors on the device, and divides sizes by `scale`."""

    def __init__(self, device: torch.device, scale: int) -> None:
        self.device, self.scale = device, scale

    def tensor(self, *shape: int, factor: float = 1.0) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=torch.bfloat16).mul_(factor)

    def scaled(self, *numbers: int) -> tuple[int, ...]:
        return tuple(max(1, number // self.scale) for number in numbers)


def gate_and_up(sizes: Sizes, tokens: int, dim: int, hidden: int) -> dict[str, Ways]:
    """Gate and up projections as two products or as one over weights that share storage, forward and backward."""
    tokens, dim, hidden = sizes.scaled(tokens, dim, hidden)
    x = sizes.tensor(tokens, dim)
    both = sizes.tensor(2 * hidden, dim, factor=dim**-0.5)
    gate, up = both[:hidden], both[hidden:]
    grads = sizes.tensor(tokens, 2 * hidden)
    grad_gate, grad_up = grads[:, :hidden].contiguous(), grads[:, hidden:].contiguous()
    return {
        "forward": {
            "two products": lambda: (x @ gate.t(), x @ up.t()),
            "one product": lambda: x @ both.t(),
        },
        "gradient of x": {
            "product and addmm": lambda: torch.addmm(grad_gate @ gate, grad_up, up),
            "one product": lambda: grads @ both,
        },
        "gradient of the weights": {
            "two products": lambda: (grad_gate.t() @ x, grad_up.t() @ x),
            "one product": lambda: grads.t() @ x,
        },
    }


def weight_gradient(sizes: Sizes, tokens: int, dim: int, hidden: int) -> dict[str, Ways]:
    """A weight's gradient added to that of earlier micro-batches."""
    tokens, dim, hidden = sizes.scaled(tokens, dim, hidden)
    x, grad = sizes.tensor(tokens, dim), sizes.tensor(tokens, hidden)
    total = sizes.tensor(hidden, dim)
    return {
        "accumulation": {
            "product and addition": lambda: total.add_(grad.t() @ x, alpha=1e-3),
            "addmm, beta 1": lambda: total.addmm_(grad.t(), x, alpha=1e-3),
        }
    }


def bias(sizes: Sizes, tokens: int, dim: int, hidden: int) -> dict[str, Ways]:
    tokens, dim, hidden = sizes.scaled(tokens, dim, hidden)
    x, w, b = sizes.tensor(tokens, dim), sizes.tensor(hidden, dim, factor=dim**-0.5), sizes.tensor(hidden)
    return {
        "bias": {
            "addmm": lambda: torch.addmm(b, x, w.t()),
            "product and addition": lambda: (x @ w.t()).add_(b),
            "linear": lambda: F.linear(x, w, b),
        },
        "bias and gelu": {
            "addmm and gelu": lambda: OPS._activation(torch.addmm(b, x, w.t()), "gelu_tanh"),
            "epilogue": lambda: torch.ops.aten._addmm_activation(b, x, w.t(), use_gelu=True),
        },
    }


def gathered_chunks(sizes: Sizes, ranks: int, tokens: int, chunks: int, dim: int, hidden: int) -> dict[str, Ways]:
    """The products of a sequence-parallel layer whose input arrives in chunks of every rank's tokens."""
    tokens, dim, hidden = sizes.scaled(tokens, dim, hidden)
    rows = max(1, tokens // ranks // chunks)
    inputs = sizes.tensor(chunks, ranks, rows, dim)
    w = sizes.tensor(hidden, dim, factor=dim**-0.5)
    y = sizes.tensor(ranks, chunks, rows, hidden)  # the sequence: a rank's chunks follow one another
    full = inputs.transpose(0, 1).reshape(-1, dim)
    weights = w.t().expand(ranks, -1, -1)
    part = sizes.tensor(ranks * rows, hidden)

    def each_rank() -> Tensor:
        for chunk in range(chunks):
            for rank in range(ranks):
                torch.mm(inputs[chunk, rank], w.t(), out=y[rank, chunk])
        return y

    def batched() -> Tensor:
        for chunk in range(chunks):
            torch.bmm(inputs[chunk], weights, out=y[:, chunk])
        return y

    def copied() -> Tensor:
        for chunk in range(chunks):
            torch.mm(inputs[chunk].view(-1, dim), w.t(), out=part)
            y[:, chunk].copy_(part.view(ranks, rows, hidden))
        return y

    return {
        f"{chunks} chunks": {
            "batched product": batched,
            "a product for each rank": each_rank,
            "one product and a copy": copied,
            "all chunks in one product": lambda: full @ w.t(),
        }
    }


def row_blocks(sizes: Sizes, tokens: int, dim: int, hidden: int) -> dict[str, Ways]:
    """A weight's gradient by blocks of rows, as optimizers that step in the backward by rows compute it."""
    tokens, dim, hidden = sizes.scaled(tokens, dim, hidden)
    x, grad = sizes.tensor(tokens, dim), sizes.tensor(tokens, hidden)

    def in_blocks(num_blocks: int) -> Callable[[], object]:
        return lambda: [rows.t() @ x for rows in grad.chunk(num_blocks, dim=1)]

    return {"blocks of rows": {f"{count} blocks": in_blocks(count) for count in (4, 1, 2, 8, 16, 86)}}


def adamw(sizes: Sizes, count: int, rows: int, dim: int) -> dict[str, Ways]:
    """A fused AdamW step of many slices, slice by slice and in one call."""
    rows, dim = sizes.scaled(rows, dim)
    slices = [[sizes.tensor(rows, dim) for _ in range(count)] for _ in range(4)]
    parameters, grads, means, squares = slices
    for square in squares:
        square.abs_()
    steps = [torch.ones((), device=sizes.device) for _ in range(count)]
    options: dict[str, Any] = {
        "lr": 1e-5,
        "beta1": 0.9,
        "beta2": 0.999,
        "weight_decay": 0.01,
        "eps": 1e-8,
        "amsgrad": False,
        "maximize": False,
    }

    def step(indices: range) -> None:
        selected = [[values[i] for i in indices] for values in (parameters, grads, means, squares)]
        torch._fused_adamw_(*selected, [], [steps[i] for i in indices], **options)

    return {
        f"AdamW of {count} slices": {
            "one call each": lambda: [step(range(i, i + 1)) for i in range(count)] and None,
            "one call": lambda: step(range(count)),
        }
    }


def loss(sizes: Sizes, tokens: int, dim: int, classes: int) -> dict[str, Ways]:
    """The loss of an output layer, with gradients of its input and weight."""
    tokens, dim, classes = sizes.scaled(tokens, dim, classes)
    x = sizes.tensor(tokens, dim).requires_grad_()
    w = sizes.tensor(classes, dim, factor=dim**-0.5).requires_grad_()
    target = torch.randint(classes, (tokens,), device=sizes.device)

    def chunked() -> tuple[Tensor, ...]:
        value = weft.ops.vocab_parallel_linear_cross_entropy(x, w, target, 0, group_name="")
        return torch.autograd.grad(value, (x, w))

    def parallel() -> tuple[Tensor, ...]:
        value = weft.ops.vocab_parallel_cross_entropy(F.linear(x, w), target, 0, group_name="")
        return torch.autograd.grad(value, (x, w))

    def plain() -> tuple[Tensor, ...]:
        return torch.autograd.grad(F.cross_entropy(F.linear(x, w), target), (x, w))

    return {"linear and cross-entropy": {"chunked": chunked, "full logits": parallel, "torch": plain}}


# Name of a group -> a function that creates its tensors and ways, which are freed after the group is measured.
GROUPS: dict[str, Callable[[Sizes], dict[str, Ways]]] = {
    "gate and up, 7b": lambda sizes: gate_and_up(sizes, 8192, 4096, 11008),
    "gate and up, 7b, 8 ranks": lambda sizes: gate_and_up(sizes, 8192, 4096, 1376),
    "gate and up, 70b, 8 ranks": lambda sizes: gate_and_up(sizes, 8192, 8192, 3584),
    "gate and up, 70b, 8 ranks, 256 tokens": lambda sizes: gate_and_up(sizes, 256, 8192, 3584),
    "weight gradient, 7b": lambda sizes: weight_gradient(sizes, 8192, 4096, 11008),
    "weight gradient, 70b, 8 ranks": lambda sizes: weight_gradient(sizes, 8192, 8192, 3584),
    "bias, 7b": lambda sizes: bias(sizes, 8192, 4096, 11008),
    "gathered chunks, 70b, 8 ranks": lambda sizes: gathered_chunks(sizes, 8, 8192, 4, 8192, 3584),
    "gathered chunks, 7b, 8 ranks": lambda sizes: gathered_chunks(sizes, 8, 4096, 4, 4096, 1376),
    "row blocks, 7b": lambda sizes: row_blocks(sizes, 8192, 4096, 11008),
    "AdamW, small slices": lambda sizes: adamw(sizes, 64, 128, 1024),
    "AdamW, large slices": lambda sizes: adamw(sizes, 8, 2752, 4096),
    "loss, 8b": lambda sizes: loss(sizes, 8192, 4096, 128256),
}
TOLERANCE = 0.05  # largest relative difference of norms, for bfloat16


def disagreement(ways: Ways) -> str | None:
    """Return a text on the first way whose result has another norm than the first way's; None: all norms agree."""
    sums = {}
    for name, call in ways.items():
        result = call()
        if result is not None:
            tensors = [result] if isinstance(result, Tensor) else list(result)  # type: ignore[call-overload]
            sums[name] = sum(tensor.detach().double().square().sum().item() for tensor in tensors) ** 0.5
    for name, value in sums.items():
        first = next(iter(sums.values()))
        if not abs(value - first) <= TOLERANCE * abs(first):
            return f"{name}: norm {value}, the first way's {first}"
    return None


def measure_group(sizes: Sizes, make: Callable[[Sizes], dict[str, Ways]], num_samples: int) -> dict[str, Any]:
    torch.manual_seed(0)
    results: dict[str, Any] = {}
    for job, ways in make(sizes).items():
        problem = disagreement(ways)
        if problem is not None:
            results[job] = {"problem": problem}
            continue
        host: dict[str, float] = {}
        for name, call in ways.items():
            start = time.perf_counter()
            call()
            host[name] = time.perf_counter() - start
        seconds = medians(ways, sizes.device, num_samples)
        first = next(iter(seconds.values()))
        results[job] = {
            name: {
                "ms": round(value * 1e3, 4),
                "host_ms": round(host[name] * 1e3, 4),
                "first_over_this": round(first / value, 3),
            }
            for name, value in seconds.items()
        }
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help="cuda, or cpu")
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS), metavar="NAME")
    parser.add_argument("--samples", type=int, default=11, help="samples of which a time is the median")
    parser.add_argument("--scale", type=int, default=1, help="number by which sizes are divided")
    parser.add_argument("--json", action="store_true", help="print one JSON object, not a table")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the JSON there after every group")
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("cuda_candidates: got no CUDA device; run it where there is one, or pass --device cpu.", file=sys.stderr)
        return 2
    groups: dict[str, Any] = {}
    report: dict[str, Any] = {
        "benchmark": "cuda_candidates",
        "machine": machine_facts(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "groups": groups,
    }
    problems = []
    for name in args.groups:
        try:
            groups[name] = measure_group(Sizes(device, args.scale), GROUPS[name], args.samples)
        except Exception as error:  # the other groups are still measured
            groups[name] = {"problem": f"{type(error).__name__}: {error}"[:500]}
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if args.output is not None:
            args.output.write_text(json.dumps(report, indent=2))
        if "problem" in json.dumps(groups[name]):
            problems.append(name)
    print(json.dumps(report, indent=2) if args.json else table(groups))
    return 1 if problems else 0


def table(groups: dict[str, Any]) -> str:
    lines = [f"{'group, job, way':<72} {'ms':>9} {'first/this':>10} {'host ms':>8}"]
    for group, jobs in groups.items():
        if "problem" in jobs:
            lines.append(f"{group}: {jobs['problem']}")
            continue
        for job, rows in jobs.items():
            if "problem" in rows:
                lines.append(f"{group}, {job}: {rows['problem']}")
                continue
            lines += [
                f"{group + ', ' + job + ', ' + name:<72.72} {row['ms']:>9.4f} {row['first_over_this']:>10.3f} "
                f"{row['host_ms']:>8.3f}"
                for name, row in rows.items()
            ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
