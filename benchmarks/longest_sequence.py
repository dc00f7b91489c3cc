"""The longest sequence with which a language model trains in a given memory per rank, by dry runs.

    python benchmarks/longest_sequence.py --ranks 1 2 4 [--memory 1GB] [--json]

The model is that of `examples/14_long_context.py` (`--dim` and so on change it), with AdamW at ZeRO stage 3, and one
sequence in a step. A dry run predicts the peak of a rank for a number of tokens; the longest sequence is found by
bisection, in multiples of 256 tokens. `none` keeps the activations of all blocks, `full` recomputes them in the
backward. `bytes` is the predicted peak. Real runs of that example report the peaks that ranks count.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import machine_facts
from torch import Tensor, nn

from weft.strategy.dry_run.process import DryRunProcess
from weft.strategy.dry_run.request import Request
from weft.strategy.tuning.request import read_bytes

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from model import ModelArgs, Transformer

STEP = 256


class Text(nn.Module):
    """The model with its loss, for ids `[1, tokens + 1]`."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.model = Transformer(args)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self.model(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def build(sizes: dict[str, int], num_tokens: int) -> nn.Module:
    return Text(ModelArgs(**sizes, max_seq_len=num_tokens))


def ids(num_tokens: int) -> Tensor:
    return torch.zeros((1, num_tokens + 1), dtype=torch.int64)


def peak_of(
    process: DryRunProcess, num_tokens: int, num_ranks: int, checkpointing: str, attention: str, sizes: dict[str, int]
) -> int:
    """Return the predicted peak of a rank, in bytes."""
    request = Request(
        functools.partial(build, sizes, num_tokens),
        f"cp{num_ranks}",
        functools.partial(ids, num_tokens),
        activation_checkpointing=checkpointing,
        context_attention=attention,
        num_steps=2,
    )
    [found] = process.run(request)
    return max(sum(usage.values()) for usage in found.phases.values())


def longest(process: DryRunProcess, limit: int, **options: Any) -> tuple[int, int]:
    """Return the largest number of tokens whose peak is at most `limit`, and that peak; (0, 0) if there is none."""
    found, peak, too_long = 0, 0, STEP
    while (next_peak := peak_of(process, too_long, **options)) <= limit:
        found, peak, too_long = too_long, next_peak, 2 * too_long
    while too_long - found > STEP:
        middle = (found + too_long) // 2 // STEP * STEP
        middle_peak = peak_of(process, middle, **options)
        if middle_peak <= limit:
            found, peak = middle, middle_peak
        else:
            too_long = middle
    return found, peak


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--memory", default="1GB", help="of a rank")
    parser.add_argument("--attention", choices=["ring", "ulysses", "ring_ulysses"], default="ring")
    for name in ("dim", "n_layers", "n_heads", "hidden_dim", "vocab_size"):
        default = getattr(ModelArgs, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--json", action="store_true", help="print one JSON object, not a table")
    args = parser.parse_args()
    sizes = {name: getattr(args, name) for name in ("dim", "n_layers", "n_heads", "hidden_dim", "vocab_size")}
    cases = []
    with DryRunProcess() as process:
        for checkpointing, num_ranks in itertools.product(("none", "full"), args.ranks):
            options = {"num_ranks": num_ranks, "checkpointing": checkpointing, "attention": args.attention}
            num_tokens, peak = longest(process, read_bytes(args.memory), **options, sizes=sizes)
            cases.append({**options, "tokens": num_tokens, "bytes": peak})
            if not args.json:
                tokens = f"{num_tokens:>9,} tokens, {peak / 1e6:,.1f} MB"
                print(f"{checkpointing:>5} {num_ranks:>3} ranks: {tokens}", flush=True)
    if args.json:
        facts = {"benchmark": "longest_sequence", "machine": machine_facts(), "memory": args.memory, **sizes}
        print(json.dumps({**facts, "cases": cases}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
