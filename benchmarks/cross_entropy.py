"""The loss over a large vocabulary: memory and time of weft's losses, torch's loss_parallel and an unsharded loss.

    python benchmarks/cross_entropy.py --ranks 2 [--json] [--check]

Each candidate computes the mean loss of hidden states and an output matrix, forward and backward. `peak` counts the
bytes of CPU tensors that weft.memory counts, on the rank with the most, without the tensors that existed before (hidden
states, targets and matrices) and without shared memory; `without gradients` leaves out the gradients of hidden states
and matrix, too. Times are medians of samples taken in turn. The candidates are:

- plain: every rank has the full matrix and F.cross_entropy of all logits;
- loss_parallel: the matrix sharded as a DTensor, F.cross_entropy in torch's loss_parallel;
- logits: column_linear and vocab_parallel_cross_entropy;
- fused: vocab_parallel_linear_cross_entropy.
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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel

import weft

CHUNK_BYTES = 32 << 20  # the logits that the fused loss holds at a time


def candidates(vocab: int, tokens: int, dim: int) -> dict[str, Callable[[], Tensor]]:
    """Return a training step of each candidate, without the optimizer; all on the same values."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    group = mesh.get_group().group_name
    x = torch.randn(tokens, dim, requires_grad=True)
    target = torch.randint(0, vocab, (tokens,))
    full = torch.randn(vocab, dim).mul_(0.02).requires_grad_()
    start, num_rows = weft.nn.shard_range(vocab, dist.get_world_size(), dist.get_rank())
    shard = full.detach()[start : start + num_rows].clone().requires_grad_()
    sharded = DTensor.from_local(shard.detach(), mesh, [Shard(0)], shape=(vocab, dim), stride=(dim, 1)).requires_grad_()

    def step(leaves: list[Tensor], loss: Callable[[], Tensor]) -> Tensor:
        value = loss()
        value.backward()
        for leaf in leaves:
            leaf.grad = None
        return value.detach()

    def with_loss_parallel() -> Tensor:
        with loss_parallel():
            hidden = DTensor.from_local(x, mesh, [Replicate()])
            value = F.cross_entropy(hidden @ sharded.t(), target)
            value.backward()
        x.grad = sharded.grad = None
        return value.detach().full_tensor()

    def weft_loss(fused: bool) -> Tensor:
        options = {"group_name": group, "vocab_size": vocab}
        if fused:
            return weft.ops.vocab_parallel_linear_cross_entropy(x, shard, target, start, **options)
        logits = weft.ops.column_linear(x, shard, group_name=group)
        return weft.ops.vocab_parallel_cross_entropy(logits, target, start, **options)

    return {
        "plain": lambda: step([x, full], lambda: F.cross_entropy(x @ full.t(), target)),
        "loss_parallel": with_loss_parallel,
        "logits": lambda: step([x, shard], lambda: weft_loss(fused=False)),
        "fused": lambda: step([x, shard], lambda: weft_loss(fused=True)),
    }


def measure(vocab: int, tokens: int, dim: int, num_samples: int) -> dict[str, Any]:
    """Return each candidate's loss, milliseconds, and extra bytes at the peak, the most of any rank; collective."""
    weft.memory.track()
    steps = candidates(vocab, tokens, dim)
    rows = {}
    matrix = vocab * dim * 4
    for name, step in steps.items():
        step()  # allocates what later steps reuse
        before = weft.memory.current() - weft.memory.by_category()["communication"]
        weft.memory.reset_peak()
        loss = step().item()
        peak = weft.memory.by_category(at="peak")
        extra = sum(peak.values()) - peak["communication"] - before
        # The gradients of the hidden states and of the matrix, which every candidate allocates.
        gradients = tokens * dim * 4 + (matrix if name == "plain" else matrix // dist.get_world_size())
        largest = torch.tensor([extra, extra - gradients])
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        rows[name] = {"loss": loss, "peak_bytes": int(largest[0]), "without_gradients": int(largest[1])}
    seconds = interleaved_seconds(steps, num_samples=num_samples, calls_per_sample=1, warm_up=0)
    for name, times in seconds.items():
        rows[name]["milliseconds"] = round(statistics.median(times) * 1e3, 1)
    return rows


def failures(rows: dict[str, Any], tokens: int) -> list[str]:
    """Return the limits that are missed, one sentence each: on the fused loss's memory, and on all losses' values.

    Besides the gradients, the fused loss may hold a chunk of logits and some numbers per token.
    """
    limit = CHUNK_BYTES + 64 * tokens
    extra = rows["fused"]["without_gradients"]
    violations = [] if extra <= limit else [f"fused: {extra} bytes without the gradients, wanted at most {limit}."]
    violations += [
        f"{name}: loss {row['loss']} instead of {rows['plain']['loss']}."
        for name, row in rows.items()
        if abs(row["loss"] - rows["plain"]["loss"]) > 1e-4
    ]
    return violations


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, help="processes of the group")
    parser.add_argument("--vocab", type=int, default=128256, help="classes")
    parser.add_argument("--tokens", type=int, default=4096, help="hidden states")
    parser.add_argument("--dim", type=int, default=256, help="features of a hidden state")
    parser.add_argument("--samples", type=int, default=3, help="samples of which the time is the median")
    parser.add_argument("--json", action="store_true", help="print one JSON object, not a table")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a limit is missed")
    args = parser.parse_args()
    rows = run_on_ranks(measure, args.ranks, args.vocab, args.tokens, args.dim, args.samples, backend="cpu:weft")
    if args.json:
        sizes = {"num_ranks": args.ranks, "vocab": args.vocab, "tokens": args.tokens, "dim": args.dim}
        report = {"benchmark": "cross_entropy", "machine": machine_facts(), **sizes, "results": rows}
        print(json.dumps(report, indent=2))
    else:
        print(f"{'':<14} {'peak MB':>9} {'without gradients':>17} {'ms':>8}")
        for name, row in rows.items():
            extra = row["peak_bytes"] / 1e6, row["without_gradients"] / 1e6
            print(f"{name:<14} {extra[0]:>9.1f} {extra[1]:>17.1f} {row['milliseconds']:>8.1f}")
    violations = failures(rows, args.tokens) if args.check else []
    for sentence in violations:
        print(sentence, file=sys.stderr)
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
