"""A mixture of experts: weft's operators against loops over experts, Hugging Face's layer and plain all-to-alls.

    python benchmarks/experts.py --ranks 1 2 [--tokens 512 4096] [--sets 3] [--json]

Each candidate computes forward and backward in float32, of a layer with SwiGLU experts whose tokens are divided over
the ranks. The candidates, sampled in turn in the same processes, several fresh sets of which run one after another:

- linear, linear_loop (1 rank): one linear layer of each expert, by `weft.ops.grouped_linear` and by a Python loop over
  the experts whose results are concatenated;
- layer: `weft.ops.moe_dispatch`, `grouped_linear`, `moe_combine`, on ranks over the backend weft;
- halves (2 and more ranks): the same in two halves of the tokens, as sharded experts compute with WEFT_OVERLAP=always;
- hugging_face (1 rank): the experts of transformers' Mixtral, with its own loop over the experts;
- all_to_all (2 and more ranks): the same layer with `torch.distributed.all_to_all_single` over gloo, and a loop over
  the experts;
- one (2 and more ranks): Mixtral's experts for the tokens of all ranks in one process, while the others wait.

Times are medians over the sets of the median sample, `P99` over all samples. `MB` are the tensors that a rank's
autograd graph keeps between forward and backward. `rows` are those of the rank with the most, of the mean; with --skew
S the logits of the experts rise by S from the first to the last, so that the later ones get more tokens.
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
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from weft.nn.shard import shard_range
from weft.ops import grouped_linear, moe_combine, moe_dispatch, route
from weft.strategy.experts.halves import exchange_in_halves

REFERENCE = {"linear": "linear_loop", "layer": "hugging_face"}  # on one rank
TOLERANCE = 1e-4
Step = Callable[[], Tensor]


class _AllToAll(torch.autograd.Function):
    """An uneven all-to-all of rows, and its reverse for the gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.arguments = sent, received, group
        result = rows.new_empty(sum(received), rows.size(1))
        dist.all_to_all_single(result, rows.contiguous(), received, sent, group=group)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        sent, received, group = ctx.arguments
        result = grad.new_empty(sum(sent), grad.size(1))
        dist.all_to_all_single(result, grad.contiguous(), sent, received, group=group)
        return result, None, None, None


def _linear_loop(x: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
    return torch.cat([F.linear(rows, matrix) for rows, matrix in zip(x.split(counts), weight, strict=True)])


def _layer(x: Tensor, weights: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor, num_experts: int) -> Tensor:
    group = dist.group.WORLD.group_name
    rows, counts, *routes = moe_dispatch(x, ids, num_experts=num_experts, group_name=group)
    gate, up = grouped_linear(rows, gate_up, counts).chunk(2, -1)
    rows = grouped_linear(F.silu(gate) * up, down, counts)
    return moe_combine(rows, weights, *routes, group_name=group)


def _layer_in_halves(
    x: Tensor, weights: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor, num_experts: int
) -> Tensor:
    def compute(rows: Tensor, counts: Tensor) -> Tensor:
        gate, up = grouped_linear(rows, gate_up, counts).chunk(2, -1)
        return grouped_linear(F.silu(gate) * up, down, counts)

    group = dist.group.WORLD.group_name
    return exchange_in_halves(compute, x, ids, weights, num_experts=num_experts, group_name=group)


def _layer_of_all_to_alls(
    x: Tensor, weights: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor, num_experts: int, group: dist.ProcessGroup
) -> Tensor:
    """Return the layer's result as a user would write it; the ranks divide the experts equally."""
    num_ranks = dist.get_world_size()
    own = num_experts // num_ranks
    order = ids.flatten().argsort(stable=True)
    counts = ids.flatten().bincount(minlength=num_experts).view(num_ranks, own)
    from_ranks = torch.empty_like(counts)
    dist.all_to_all_single(from_ranks, counts, group=group)
    sent, received = counts.sum(1).tolist(), from_ranks.sum(1).tolist()
    rows = _AllToAll.apply(x[order // ids.size(1)], sent, received, group)
    by_expert = torch.arange(own).repeat(num_ranks).repeat_interleave(from_ranks.flatten()).argsort(stable=True)
    of_experts = from_ranks.sum(0).tolist()
    gate, up = _linear_loop(rows[by_expert], gate_up, of_experts).chunk(2, -1)
    results = _linear_loop(F.silu(gate) * up, down, of_experts)
    returned = _AllToAll.apply(results[by_expert.argsort()], received, sent, group)
    return (returned[order.argsort()].view(*ids.shape, -1) * weights.unsqueeze(-1)).sum(1)


def candidates(args: argparse.Namespace, num_tokens: int) -> tuple[dict[str, tuple[Step, list[Tensor]]], float]:
    """Return the function of each candidate with its leaves on this rank, and the most rows of a rank, of the mean."""
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    gloo = dist.new_group(backend="gloo")
    generator = torch.Generator().manual_seed(0)
    config = MixtralConfig(
        hidden_size=args.features, intermediate_size=args.hidden, num_local_experts=args.experts, hidden_act="silu"
    )
    config._experts_implementation = "eager"
    shapes = {
        "gate_up": (args.experts, 2 * args.hidden, args.features),
        "down": (args.experts, args.features, args.hidden),
    }
    full = {name: torch.randn(shape, generator=generator) * shape[2] ** -0.5 for name, shape in shapes.items()}
    x = torch.randn(num_tokens, args.features, generator=generator)
    logits = torch.randn(num_tokens, args.experts, generator=generator) + torch.linspace(0, args.skew, args.experts)
    weights, ids = route(logits, args.top_k)
    counts = ids.flatten().bincount(minlength=args.experts)
    of_ranks = [
        int(counts[start : start + length].sum())
        for start, length in (shard_range(args.experts, num_ranks, each) for each in range(num_ranks))
    ]

    def leaf(tensor: Tensor) -> Tensor:
        return tensor.clone().requires_grad_()

    def shard(tensor: Tensor) -> Tensor:
        start, length = shard_range(len(tensor), num_ranks, rank)
        return tensor.narrow(0, start, length)

    found: dict[str, tuple[Step, list[Tensor]]] = {}

    def add(name: str, function: Callable[..., Tensor], *tensors: Tensor) -> None:
        leaves = [leaf(tensor) for tensor in tensors]
        found[name] = (lambda: function(*leaves)), leaves

    def hugging_face(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        experts.gate_up_proj, experts.down_proj = gate_up, down
        return experts(x, ids, weights)

    with torch.device("meta"):
        experts: Any = MixtralExperts(config)
    for name in ("gate_up_proj", "down_proj"):
        del experts._parameters[name]
    everything = x, weights, *full.values()
    own_ids = shard(ids).contiguous()
    add(
        "layer",
        lambda x, weights, gate_up, down: _layer(x, weights, own_ids, gate_up, down, args.experts),
        *map(shard, everything),
    )
    if num_ranks == 1:
        rows = x[ids.flatten().argsort(stable=True) // args.top_k]
        sizes = counts.tolist()
        add("linear", lambda x, weight: grouped_linear(x, weight, counts), rows, full["gate_up"])
        add("linear_loop", lambda x, weight: _linear_loop(x, weight, sizes), rows, full["gate_up"])
        add("hugging_face", hugging_face, *everything)
    else:
        add(
            "halves",
            lambda x, weights, gate_up, down: _layer_in_halves(x, weights, own_ids, gate_up, down, args.experts),
            *map(shard, everything),
        )
        add(
            "all_to_all",
            lambda x, weights, gate_up, down: _layer_of_all_to_alls(
                x, weights, own_ids, gate_up, down, args.experts, gloo
            ),
            *map(shard, everything),
        )
        add("one", hugging_face, *everything)
    return found, max(of_ranks) * num_ranks / max(1, sum(of_ranks))


def _reference_of(name: str, num_ranks: int) -> str:
    return "one" if num_ranks > 1 else REFERENCE.get(name, name)


def measure(num_tokens: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return each candidate's samples in seconds, saved bytes, and difference from its reference; collective."""
    rows: dict[str, dict[str, Any]] = {}
    steps: dict[str, Callable[[], None]] = {}
    sums: dict[str, Tensor] = {}
    num_ranks = dist.get_world_size()
    found, most_rows = candidates(args, num_tokens)
    for name, (forward, leaves) in found.items():

        def step(forward: Step = forward) -> None:
            forward().square().sum().backward()

        def step_alone(step: Callable[[], None] = step) -> None:
            if dist.get_rank() == 0:
                step()
            dist.barrier()

        saved: dict[int, int] = {}

        def pack(x: Tensor, saved: dict[int, int] = saved) -> Tensor:
            saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            out = forward()
        out.square().sum().backward()
        # The sums of squares do not depend on which rank has a token or an expert.
        sums[name] = torch.stack([each.double().square().sum() for each in (out, *(each.grad for each in leaves))])
        if name != "one":
            dist.all_reduce(sums[name])
        rows[name] = {"saved_bytes": sum(saved.values())}
        steps[name] = step_alone if name == "one" else step
    seconds = interleaved_seconds(steps, num_samples=args.samples, calls_per_sample=1, warm_up=1)
    for name, row in rows.items():
        difference = (sums[name] / sums[_reference_of(name, num_ranks)] - 1).abs().max().item()
        row |= {"seconds": seconds[name], "difference": difference}
    return {"most_rows": most_rows, "rows": rows}


def case_of(num_ranks: int, num_tokens: int, args: argparse.Namespace) -> dict[str, Any]:
    sets = [run_on_ranks(measure, num_ranks, num_tokens, args, backend="cpu:weft") for _ in range(args.sets)]
    results = {}
    for name in sets[0]["rows"]:
        samples = sorted(second for each in sets for second in each["rows"][name]["seconds"])
        results[name] = {
            "milliseconds": statistics.median(statistics.median(each["rows"][name]["seconds"]) for each in sets) * 1e3,
            "p99_milliseconds": samples[int(0.99 * (len(samples) - 1) + 0.5)] * 1e3,
            "saved_bytes": sets[0]["rows"][name]["saved_bytes"],
            "difference": max(each["rows"][name]["difference"] for each in sets),
        }
    return {"num_ranks": num_ranks, "num_tokens": num_tokens, "most_rows": sets[0]["most_rows"], "results": results}


def failures(cases: list[dict[str, Any]]) -> list[str]:
    """Return a sentence for each candidate with wrong results."""
    return [
        f"{case['num_tokens']} tokens on {case['num_ranks']} ranks: the results of {name} differ by "
        f"{row['difference']:.1e} from their reference."
        for case in cases
        for name, row in case["results"].items()
        if row["difference"] > TOLERANCE
    ]


def print_table(cases: list[dict[str, Any]]) -> None:
    print(
        f"{'ranks':>5} {'tokens':>7} {'rows':>5}  {'candidate':<12} {'ms':>9} {'P99':>9} {'of reference':>12} {'MB':>8}"
    )
    for case in cases:
        for name, row in case["results"].items():
            reference = case["results"][_reference_of(name, case["num_ranks"])]["milliseconds"]
            times = (
                f"{row['milliseconds']:>9.1f} {row['p99_milliseconds']:>9.1f} {row['milliseconds'] / reference:>12.2f}"
            )
            sizes = f"{case['num_ranks']:>5} {case['num_tokens']:>7} {case['most_rows']:>5.2f}  {name:<12}"
            print(f"{sizes} {times} {row['saved_bytes'] / 1e6:>8.2f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 4096], help="tokens of all ranks")
    parser.add_argument("--experts", type=int, default=16, help="experts of all ranks, a multiple of their number")
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--features", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=1024, help="hidden size of an expert")
    parser.add_argument("--skew", type=float, default=0.0, help="difference of logits of the last and the first expert")
    parser.add_argument("--sets", type=int, default=3, help="fresh sets of processes")
    parser.add_argument("--samples", type=int, default=5, help="samples of a set")
    parser.add_argument("--json", action="store_true", help="print one JSON object, not a table")
    args = parser.parse_args()
    for num_ranks in args.ranks:
        if args.experts % num_ranks:
            parser.error(f"got --experts {args.experts} on {num_ranks} ranks: pass a multiple.")
    cases = [case_of(num_ranks, size, args) for num_ranks in args.ranks for size in args.tokens]
    if args.json:
        names = ("experts", "top_k", "features", "hidden", "skew", "sets", "samples")
        sizes = {name: getattr(args, name) for name in names}
        print(json.dumps({"benchmark": "experts", "machine": machine_facts(), **sizes, "cases": cases}, indent=2))
    else:
        print_table(cases)
    found = failures(cases)
    for sentence in found:
        print(sentence, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
