"""Attention over a sharded sequence: weft's ring and Ulysses against one process and torch's ring over gloo.

    python benchmarks/context.py --ranks 2 [--sequences 2048 8192] [--sets 3] [--json] [--check]

Each candidate computes causal attention of one sequence, forward and backward, in float32. The candidates, sampled in
turn in the same processes, several fresh sets of which run one after another:

- one: F.scaled_dot_product_attention of the full sequence in one process, while the others wait;
- ring, ulysses: `weft.ops.ring_attention` in "head_tail" order and `weft.ops.ulysses_attention`, over the backend weft;
- torch: the ring of torch.distributed.tensor.experimental's context parallelism over gloo, with its load balancing. Its
  public functions support CUDA kernels only; the benchmark calls the private ones with torch's kernel for the CPU, the
  same that weft's ring calls.

With --window W there are two more, with sliding-window attention of W tokens: `one_window` with torch's mask, and
`ring_window` in "contiguous" order.

Times are medians over the sets of the median sample, `P99` over all samples. `bytes` are those of the tensors that a
rank's autograd graph keeps between forward and backward, with query, key and value.

--check: ring takes at most the time of torch's ring, and at most two thirds of it for 8192 tokens on 4 ranks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import interleaved_seconds, machine_facts, run_on_ranks
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel import _attention as torch_ring

from weft.ops import ring_attention, shard_sequence, ulysses_attention

NAMES = ("one", "ring", "ulysses", "torch")
WINDOWED = ("one_window", "ring_window")
SLOWEST, SLOWEST_AT, SLOWEST_THERE = 1.0, (4, 8192), 2 / 3
TOLERANCE = 1e-4


class _TorchRing(torch.autograd.Function):
    """The causal ring of torch's context parallelism, on CPU tensors."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = torch_ring._templated_ring_attention(group, 2, kernel, query, key, value, is_causal=True)
        ctx.group = group
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        query, key, value, out, lse = ctx.saved_tensors
        gradients = torch_ring._templated_ring_attention_backward(
            ctx.group, 2, kernel, grad_out, "grad_out", query, key, value, out, lse, True, dropout_p=0.0
        )
        return (*gradients[:3], None)


Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def candidates(
    num_tokens: int, heads: int, kv_heads: int, head_dim: int, window: int | None
) -> dict[str, tuple[Attention, list[Tensor]]]:
    """Return the function of each candidate and its query, key, value and gradient of the result on this rank."""
    group = dist.group.WORLD.group_name
    gloo = dist.new_group(backend="gloo")
    generator = torch.Generator().manual_seed(0)
    full = [torch.randn(1, n, num_tokens, head_dim, generator=generator) for n in (heads, kv_heads, kv_heads, heads)]
    repeats = heads // kv_heads

    def shards(order: Any) -> list[Tensor]:
        return [shard_sequence(each, 2, group, order=order).contiguous() for each in full]

    def repeated(x: Tensor) -> Tensor:
        return x.repeat_interleave(repeats, 1) if repeats > 1 else x

    found: dict[str, tuple[Attention, list[Tensor]]] = {
        "one": (lambda q, k, v: F.scaled_dot_product_attention(q, repeated(k), repeated(v), is_causal=True), full),
        "ring": (lambda q, k, v: ring_attention(q, k, v, group_name=group, is_causal=True), shards("head_tail")),
        "ulysses": (lambda q, k, v: ulysses_attention(q, k, v, group_name=group, is_causal=True), shards("contiguous")),
        "torch": (lambda q, k, v: _TorchRing.apply(q, repeated(k), repeated(v), gloo), shards("head_tail")),
    }
    if window is not None:
        # Tensors of its own, as the gradients are compared.
        copies = [each.clone() for each in full]
        mask = torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril_().triu_(1 - window)
        options: dict[str, Any] = {"is_causal": True, "order": "contiguous", "window": window}
        found["one_window"] = (
            lambda q, k, v: F.scaled_dot_product_attention(q, repeated(k), repeated(v), attn_mask=mask),
            copies,
        )
        found["ring_window"] = (
            lambda q, k, v: ring_attention(q, k, v, group_name=group, **options),
            shards("contiguous"),
        )
    return found


def reference_of(name: str) -> str:
    """Return the candidate that computes the same in one process."""
    return "one_window" if name in WINDOWED else "one"


def measure(
    num_tokens: int, heads: int, kv_heads: int, head_dim: int, window: int | None, num_samples: int
) -> dict[str, Any]:
    """Return each candidate's samples in seconds, saved bytes, and difference from one process; collective."""
    rows: dict[str, dict[str, Any]] = {}
    steps: dict[str, Callable[[], None]] = {}
    sums: dict[str, list[float]] = {}
    for name, (attention, (*inputs, grad_out)) in candidates(num_tokens, heads, kv_heads, head_dim, window).items():
        for each in inputs:
            each.requires_grad_()

        def step(attention: Attention = attention, inputs: Any = inputs, grad_out: Tensor = grad_out) -> None:
            attention(*inputs).backward(grad_out)

        def step_alone(step: Callable[[], None] = step) -> None:
            if dist.get_rank() == 0:
                step()
            dist.barrier()

        saved: dict[int, int] = {}

        def pack(x: Tensor, saved: dict[int, int] = saved) -> Tensor:
            saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            out = attention(*inputs)
        out.backward(grad_out)
        # The sums of squares of the result and the gradients do not depend on the order of the tokens.
        values = torch.stack([each.double().square().sum() for each in (out, *(each.grad for each in inputs))])
        if name != reference_of(name):
            dist.all_reduce(values)
        sums[name] = values.tolist()
        rows[name] = {"saved_bytes": sum(saved.values())}
        steps[name] = step_alone if name == reference_of(name) else step
    seconds = interleaved_seconds(steps, num_samples=num_samples, calls_per_sample=1, warm_up=1)
    for name, row in rows.items():
        differences = [abs(a / b - 1) for a, b in zip(sums[name], sums[reference_of(name)], strict=True)]
        row |= {"seconds": seconds[name], "difference": max(differences)}
    return rows


def case_of(num_ranks: int, num_tokens: int, args: argparse.Namespace) -> dict[str, Any]:
    sizes = (num_tokens, args.heads, args.kv_heads, args.head_dim, args.window, args.samples)
    sets = [run_on_ranks(measure, num_ranks, *sizes, backend="cpu:weft") for _ in range(args.sets)]
    results = {}
    for name in NAMES if args.window is None else NAMES + WINDOWED:
        samples = sorted(second for rows in sets for second in rows[name]["seconds"])
        results[name] = {
            "milliseconds": statistics.median(statistics.median(rows[name]["seconds"]) for rows in sets) * 1e3,
            "p99_milliseconds": samples[int(0.99 * (len(samples) - 1) + 0.5)] * 1e3,
            "saved_bytes": sets[0][name]["saved_bytes"],
            "difference": max(rows[name]["difference"] for rows in sets),
        }
    ratios = [statistics.median(rows["ring"]["seconds"]) / statistics.median(rows["torch"]["seconds"]) for rows in sets]
    return {
        "num_ranks": num_ranks,
        "num_tokens": num_tokens,
        "ring_of_torch": statistics.median(ratios),
        "results": results,
    }


def failures(cases: list[dict[str, Any]]) -> list[str]:
    """Return the limits that are missed, one sentence each."""
    found = []
    for case in cases:
        where = f"{case['num_tokens']} tokens on {case['num_ranks']} ranks"
        limit = SLOWEST_THERE if (case["num_ranks"], case["num_tokens"]) == SLOWEST_AT else SLOWEST
        if case["ring_of_torch"] > limit:
            found.append(f"{where}: ring takes {case['ring_of_torch']:.2f} of torch's time, wanted {limit:.2f}.")
        for name, row in case["results"].items():
            if row["difference"] > TOLERANCE:
                found.append(f"{where}: the results of {name} differ by {row['difference']:.1e} from one process.")
    return found


def print_table(cases: list[dict[str, Any]]) -> None:
    print(f"{'ranks':>5} {'tokens':>7}  {'candidate':<11} {'ms':>9} {'P99':>9} {'of one':>7} {'of torch':>8} {'MB':>8}")
    for case in cases:
        results = case["results"]
        for name, row in results.items():
            of_one, of_torch = (
                row["milliseconds"] / results[other]["milliseconds"] for other in (reference_of(name), "torch")
            )
            times = f"{row['milliseconds']:>9.1f} {row['p99_milliseconds']:>9.1f} {of_one:>7.2f} {of_torch:>8.2f}"
            sizes = f"{case['num_ranks']:>5} {case['num_tokens']:>7}  {name:<11}"
            print(f"{sizes} {times} {row['saved_bytes'] / 1e6:>8.2f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sequences", type=int, nargs="+", default=[2048, 8192, 32768], help="tokens")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument(
        "--window", type=int, help="tokens of sliding-window attention, at most the tokens of a sequence"
    )
    parser.add_argument("--sets", type=int, default=3, help="fresh sets of processes")
    parser.add_argument("--samples", type=int, default=5, help="samples of a set")
    parser.add_argument("--json", action="store_true", help="print one JSON object, not a table")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a limit is missed")
    args = parser.parse_args()
    cases = [case_of(num_ranks, size, args) for num_ranks in args.ranks for size in args.sequences]
    if args.json:
        sizes = {name: getattr(args, name) for name in ("heads", "kv_heads", "head_dim", "window", "sets", "samples")}
        print(json.dumps({"benchmark": "context", "machine": machine_facts(), **sizes, "cases": cases}, indent=2))
    else:
        print_table(cases)
    found = failures(cases)
    for sentence in found if args.check else []:
        print(sentence, file=sys.stderr)
    return 1 if args.check and found else 0


if __name__ == "__main__":
    sys.exit(main())
