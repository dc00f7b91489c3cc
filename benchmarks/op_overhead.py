"""Forward + backward of a SwiGLU feed-forward: weft's operator against Lightning's documented DTensor plan.

    python benchmarks/op_overhead.py --ranks 2 [--json] [--check]

Each side is the module that a user gets: FeedForward(d, d) with w1, w2, w3 as DTensors over the ranks, on one side by
`weft.parallelize`, on the other by `parallelize_module` with ColwiseParallel w1, w3 and RowwiseParallel w2, with the
same weights, one thread per rank. The input requires a gradient, as inside a network. The DTensor side runs on gloo,
torch's default backend for CPUs; weft's side runs on the weft backend and, to separate the effects of the operator and
of the backend, on gloo too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from common import FeedForward, interleaved_seconds, machine_facts, median_paired_ratio, run_on_ranks
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


@dataclass(frozen=True)
class Shape:
    """FeedForward(dim, dim) on `num_tokens` tokens; a sample times `calls_per_sample` calls: one may be too short."""

    dim: int
    num_tokens: int
    calls_per_sample: int
    num_samples: int


SHAPES = (Shape(64, 8, 20, 31), Shape(512, 64, 5, 31), Shape(2048, 64, 1, 21))
# The limits of --check on the median of paired ratios weft / DTensor.
MAX_RATIO = 1.02  # for all shapes but the first, on either backend
MAX_RATIO_SMALLEST = 1 / 1.8  # for the first shape, weft on gloo
MAX_RATIO_SMALLEST_ON_WEFT = {2: 1 / 10, 4: 1 / 15}  # number of ranks -> limit for the first shape, weft on its backend


def with_weft(dim: int, mesh: DeviceMesh) -> nn.Module:
    import weft

    torch.manual_seed(0)
    return weft.parallelize(FeedForward(dim, dim), mesh, {"": "column_row_mlp"})


def with_dtensor(dim: int, mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(0)
    plan = {"w1": ColwiseParallel(), "w2": RowwiseParallel(), "w3": ColwiseParallel()}
    return parallelize_module(FeedForward(dim, dim), mesh, plan)


def forward_backward(module: nn.Module, x: Tensor, grad_y: Tensor) -> Callable[[], Tensor]:
    """Return a call that runs forward and backward, drops the parameters' gradients and returns the gradient of x."""
    parameters = list(module.parameters())

    def call() -> Tensor:
        leaf = x.detach().requires_grad_()
        wait_for(module(leaf)).backward(grad_y)
        for parameter in parameters:
            parameter.grad = None
        return wait_for(leaf.grad)

    return call


def wait_for(tensor: Tensor | None) -> Tensor:
    """Return the tensor after waiting for its all-reduce: DTensor returns AsyncCollectiveTensors."""
    assert tensor is not None
    if isinstance(tensor, AsyncCollectiveTensor):
        tensor.trigger_wait()
    return tensor


def mesh_on(backend: str) -> DeviceMesh:
    names = ("tensor_parallel",)
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=names, backend_override={0: backend})


def measure(shape: Shape) -> dict[str, Any]:
    """Check that all sides agree, then return their times, taken in turn; collective."""
    import weft  # noqa: F401  (registers the backend)

    modules = {
        "weft": with_weft(shape.dim, mesh_on("cpu:weft")),
        "weft_on_gloo": with_weft(shape.dim, mesh_on("gloo")),
        "dtensor": with_dtensor(shape.dim, mesh_on("gloo")),
    }
    torch.manual_seed(1)
    x, grad_y = torch.randn(shape.num_tokens, shape.dim), torch.randn(shape.num_tokens, shape.dim)
    calls = {name: forward_backward(module, x, grad_y) for name, module in modules.items()}
    for weft_side in ("weft", "weft_on_gloo"):  # + 0 makes a plain tensor of an AsyncCollectiveTensor
        with torch.no_grad():
            torch.testing.assert_close(modules[weft_side](x), wait_for(modules["dtensor"](x)) + 0, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(calls[weft_side](), calls["dtensor"]() + 0, rtol=1e-4, atol=1e-5)
    return interleaved_seconds(calls, num_samples=shape.num_samples, calls_per_sample=shape.calls_per_sample)


def summarise(shape: Shape, seconds: dict[str, list[float]]) -> dict[str, Any]:
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    return {
        "dim": shape.dim,
        "num_tokens": shape.num_tokens,
        "num_pairs": shape.num_samples,
        "calls_per_sample": shape.calls_per_sample,
        **{f"{name}_median_ms": round(median * 1e3, 4) for name, median in medians.items()},
        **{
            f"{name}_over_dtensor": round(median_paired_ratio(seconds[name], seconds["dtensor"]), 4)
            for name in ("weft", "weft_on_gloo")
        },
    }


def failures(num_ranks: int, results: list[dict[str, Any]]) -> list[str]:
    """Return the limits that are missed, one sentence each."""
    violations = []
    for position, result in enumerate(results):
        limits = {"weft_on_gloo": MAX_RATIO_SMALLEST if position == 0 else MAX_RATIO, "weft": MAX_RATIO}
        if position == 0:
            limits["weft"] = MAX_RATIO_SMALLEST_ON_WEFT.get(num_ranks, MAX_RATIO_SMALLEST)
        for name, limit in limits.items():
            ratio = result[f"{name}_over_dtensor"]
            if ratio > limit:
                shape = f"(d, T) = ({result['dim']}, {result['num_tokens']})"
                violations.append(f"{shape}: {name} / DTensor is {ratio}, wanted at most {limit:.3f}.")
    return violations


def print_table(report: dict[str, Any]) -> None:
    machine = report["machine"]
    print(f"SwiGLU feed-forward d -> d -> d, forward + backward, {report['num_ranks']} ranks x 1 thread, ms")
    print(f"{machine['cpu']}, {machine['cpu_count']} cores, torch {machine['torch']}, {machine['date']}")
    print(f"{'d':>5} {'T':>4} {'weft':>9} {'on gloo':>9} {'DTensor':>9}  / DTensor:  {'weft':>7} {'on gloo':>8}")
    for row in report["results"]:
        print(
            f"{row['dim']:>5} {row['num_tokens']:>4} {row['weft_median_ms']:>9.3f} "
            f"{row['weft_on_gloo_median_ms']:>9.3f} {row['dtensor_median_ms']:>9.3f}              "
            f"{row['weft_over_dtensor']:>7.3f} {row['weft_on_gloo_over_dtensor']:>8.3f}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, help="processes of the group")
    parser.add_argument("--json", action="store_true", help="print one JSON object, not a table")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a limit is missed")
    args = parser.parse_args()
    if args.ranks < 1:
        parser.error(f"got --ranks {args.ranks}; give 1 or more.")

    report: dict[str, Any] = {
        "benchmark": "op_overhead",
        "machine": machine_facts(),
        "num_ranks": args.ranks,
        "results": [
            summarise(shape, run_on_ranks(measure, args.ranks, shape, timeout_seconds=300.0)) for shape in SHAPES
        ],
    }
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        print_table(report)
    violations = failures(args.ranks, report["results"]) if args.check else []
    for sentence in violations:
        print(sentence, file=sys.stderr)
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
