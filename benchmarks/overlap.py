"""Sequence-parallel operators: the speed of WEFT_OVERLAP=auto relative to unchunked collectives, for several shapes.

    python benchmarks/overlap.py --ranks 2 [--json] [--check]

Forward + backward of the sequence-parallel operators, for M tokens over all ranks, on the weft backend, one thread per
rank, float32. With auto, the overlap tuner times chunked and unchunked calls of a shape and then chooses between them;
here the tuner starts without earlier choices. After its choice, unchunked calls, auto and unchunked calls again
("unchunked_again", which shows the noise) are timed in turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from common import interleaved_seconds, machine_facts, median_paired_ratio, run_on_ranks
from torch import Tensor

import weft

NUM_TOKENS = (8, 64, 512, 2048, 8192)
NUM_SAMPLES, NUM_SHORT_SAMPLES = 15, 41
SHORT_SECONDS = 0.05  # shorter calls are sampled NUM_SHORT_SAMPLES times
CALLS_UNTIL_CHOSEN = 35  # calls of a shape after which the overlap tuner has chosen
# The least speed of auto relative to unchunked calls that --check requires, beyond noise, of every shape; then that of
# the fastest shape, on 2 ranks only.
MIN_SPEED = 0.98
MIN_BEST_SPEED = 1.10
SAMPLE_SECONDS = 0.01  # at least, approximately


@dataclass(frozen=True)
class Layer:
    """An operator and the features of its input and output on each rank; for an MLP, `num_out` is the hidden size."""

    op: str
    num_in: int
    num_out: int


LAYERS = (
    Layer("all_gather_linear", 1024, 64),
    Layer("all_gather_linear", 1024, 1024),
    Layer("linear_reduce_scatter", 64, 1024),
    Layer("linear_reduce_scatter", 512, 1024),
    Layer("column_row_mlp", 512, 512),
)


def _call_of(layer: Layer, num_tokens: int) -> Callable[[], None]:
    """Return a call that runs forward and backward of the layer on this rank's tokens."""
    torch.manual_seed(0)
    num_ranks = dist.get_world_size()
    group_name = dist.group.WORLD.group_name

    def weight(*sizes: int) -> Tensor:
        return (torch.randn(sizes) / sizes[-1] ** 0.5).requires_grad_()

    shard_size = num_tokens // num_ranks
    if layer.op == "all_gather_linear":
        leaves = [torch.randn(shard_size, layer.num_in, requires_grad=True), weight(layer.num_out, layer.num_in)]
        grad = torch.randn(num_tokens, layer.num_out)
    elif layer.op == "linear_reduce_scatter":
        leaves = [torch.randn(num_tokens, layer.num_in, requires_grad=True), weight(layer.num_out, layer.num_in)]
        grad = torch.randn(shard_size, layer.num_out)
    else:
        sizes = [(layer.num_out, layer.num_in), (layer.num_in, layer.num_out), (layer.num_out, layer.num_in)]
        leaves = [torch.randn(shard_size, layer.num_in, requires_grad=True), *(weight(*size) for size in sizes)]
        grad = torch.randn(shard_size, layer.num_in)
    options = {
        "all_gather_linear": {"gather_dim": 0},
        "linear_reduce_scatter": {"scatter_dim": 0},
        "column_row_mlp": {"activation": "silu", "sequence_dim": 0},
    }[layer.op]
    operator = getattr(weft.ops, layer.op)

    def call() -> None:
        for leaf in leaves:
            leaf.grad = None
        operator(*leaves, group_name=group_name, **options).backward(grad)

    return call


def _in_mode(mode: str, call: Callable[[], None]) -> Callable[[], None]:
    def call_in_mode() -> None:
        weft.overlap.set_mode(mode)
        call()

    return call_in_mode


def measure(layer: Layer, num_tokens: int) -> dict[str, Any]:
    """Return the overlap tuner's choices for one shape, and the times measured after the choices; collective."""
    call = _call_of(layer, num_tokens)
    weft.overlap.clear()
    candidates = {name: _in_mode(mode, call) for name, mode in MODES.items()}
    for _ in range(CALLS_UNTIL_CHOSEN):
        candidates["auto"]()
    trial = interleaved_seconds({"unchunked": candidates["unchunked"]}, num_samples=3, calls_per_sample=1)
    call_seconds = statistics.median(trial["unchunked"])
    calls_per_sample = max(1, round(SAMPLE_SECONDS / call_seconds))
    num_samples = NUM_SHORT_SAMPLES if call_seconds < SHORT_SECONDS else NUM_SAMPLES
    times = interleaved_seconds(candidates, num_samples=num_samples, calls_per_sample=calls_per_sample, warm_up=1)
    return {"seconds": times, "choices": [asdict(choice) for choice in weft.overlap.table()]}


MODES = {"unchunked": "never", "auto": "auto", "unchunked_again": "never"}


def summarise(layer: Layer, num_tokens: int, measured: dict[str, Any]) -> dict[str, Any]:
    seconds = measured["seconds"]
    return {
        **asdict(layer),
        "num_tokens": num_tokens,
        "num_pairs": len(seconds["auto"]),
        **{f"{name}_median_ms": round(statistics.median(times) * 1e3, 3) for name, times in seconds.items()},
        "speed_of_auto": round(median_paired_ratio(seconds["unchunked"], seconds["auto"]), 4),
        "speed_of_unchunked_again": round(median_paired_ratio(seconds["unchunked"], seconds["unchunked_again"]), 4),
        "noise": round(noise_of(seconds["unchunked"], seconds["auto"]), 4),
        "choices": {
            choice["op"]: {"in_pieces": choice["in_pieces"], "ratio": round(choice["ratio"], 3)}
            for choice in measured["choices"]
        },
    }


def noise_of(numerators: list[float], denominators: list[float]) -> float:
    """Return the half-width of the 95 % confidence interval of the ratios' median, after McGill, Tukey and Larsen."""
    first, _, third = statistics.quantiles((a / b for a, b in zip(numerators, denominators, strict=True)), n=4)
    return 1.57 * (third - first) / len(numerators) ** 0.5


def failures(num_ranks: int, results: list[dict[str, Any]]) -> list[str]:
    """Return the limits that are missed beyond noise, one sentence each."""
    violations = []
    for result in results:
        noise = max(result["noise"], abs(1 - result["speed_of_unchunked_again"]))
        if result["speed_of_auto"] < MIN_SPEED - noise:
            violations.append(
                f"{result['op']} {result['num_in']} -> {result['num_out']}, {result['num_tokens']} tokens: auto has "
                f"{result['speed_of_auto']} of the unchunked speed, wanted {MIN_SPEED} (noise {noise:.3f})."
            )
    best = max(result["speed_of_auto"] for result in results)
    if num_ranks == 2 and best < MIN_BEST_SPEED:
        violations.append(f"The best speed of auto over unchunked is {best}, wanted {MIN_BEST_SPEED} somewhere.")
    return violations


def print_table(report: dict[str, Any]) -> None:
    machine = report["machine"]
    print(f"Forward + backward, {report['num_ranks']} ranks x 1 thread, ms; speeds over unchunked, medians of pairs")
    print(f"{machine['cpu']}, {machine['cpu_count']} cores, torch {machine['torch']}, {machine['date']}")
    print(
        f"{'operator':<22} {'features':>12} {'M':>5} {'unchunked':>9} {'auto':>9} {'auto x':>7} {'noise x':>7}  chunked"
    )
    for row in report["results"]:
        chosen = [name.removeprefix("weft::") for name, each in row["choices"].items() if each["in_pieces"]]
        halves = ["backward" if name.endswith("backward") else "forward" for name in chosen]
        print(
            f"{row['op']:<22} {row['num_in']:>5}, {row['num_out']:>5} {row['num_tokens']:>5} "
            f"{row['unchunked_median_ms']:>9.2f} {row['auto_median_ms']:>9.2f} {row['speed_of_auto']:>7.3f} "
            f"{row['speed_of_unchunked_again']:>7.3f}  {', '.join(halves)}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, help="processes of the group")
    parser.add_argument("--tokens", type=int, nargs="+", default=NUM_TOKENS, help="tokens of all ranks together")
    parser.add_argument("--json", action="store_true", help="print one JSON object, not a table")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a limit is missed")
    args = parser.parse_args()
    if args.ranks < 2:
        parser.error(f"got --ranks {args.ranks}; give 2 or more: one rank has nothing to send.")
    if any(num_tokens < args.ranks or num_tokens % args.ranks for num_tokens in args.tokens):
        parser.error(f"got --tokens {args.tokens}; give multiples of {args.ranks}, the number of ranks.")

    results = [
        summarise(
            layer,
            num_tokens,
            run_on_ranks(measure, args.ranks, layer, num_tokens, timeout_seconds=600.0, backend="cpu:weft"),
        )
        for layer in LAYERS
        for num_tokens in args.tokens
    ]
    report = {"benchmark": "overlap", "machine": machine_facts(), "num_ranks": args.ranks, "results": results}
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        print_table(report)
    violations = failures(args.ranks, results) if args.check else []
    for sentence in violations:
        print(sentence, file=sys.stderr)
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
