"""A training step of a small Llama on CPU ranks: blocks compiled by torch.compile against eager blocks.

    python benchmarks/compile_blocks.py [--layouts tp2 tp2,sequence dp2] [--layers 4] [--dim 256] [--tokens 128]
                                        [--sets 3] [--samples 7] [--json]

A step is forward, cross-entropy, backward and SGD. Both models are on the same ranks, start from the same weights, and
their losses must agree. Their steps are measured in turn; a ratio is the median over the samples of a set, and the
report has the median over fresh sets of processes. `compile_seconds` is the first step of the compiled model.

Layouts: "tp2" is tensor parallelism, "tp2,sequence" with sequence parallelism, "dp2" FSDP2 (ZeRO stage 3).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import interleaved_seconds, machine_facts, median_paired_ratio, run_on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import weft
from weft.strategy import compile_blocks
from weft.strategy.data_parallel import apply_fsdp

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from model import ModelArgs, Transformer

NUM_RANKS = 2
LAYOUTS = ("tp2", "tp2,sequence", "dp2")
LOSS_TOLERANCE = 1e-4  # relative, for float32
WARM_UP = 3


class Side:
    """A sharded model with its optimizer and a batch."""

    def __init__(self, layout: str, args: ModelArgs, batch: int, is_compiled: bool) -> None:
        shape = (NUM_RANKS, 1) if layout == "dp2" else (1, NUM_RANKS)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data_parallel", "tensor_parallel"))
        torch.manual_seed(0)
        plan = weft.strategy.Plan("auto", sequence_parallel="sequence" in layout)
        shards_data = layout == "dp2"
        self.model: nn.Module = weft.parallelize(Transformer(args), mesh, plan, keeps_plain_on_one_rank=shards_data)
        if is_compiled:
            compile_blocks(self.model)
        if shards_data:
            apply_fsdp(self.model, mesh["data_parallel"])
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        generator = torch.Generator().manual_seed(1)
        self.tokens: Tensor = torch.randint(args.vocab_size, (batch, args.max_seq_len), generator=generator)
        self.loss = 0.0

    def step(self) -> None:
        self.optimizer.zero_grad()
        logits = self.model(self.tokens)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), self.tokens[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.loss = loss.item()


def measure(layout: str, args: ModelArgs, batch: int, num_samples: int) -> dict[str, Any]:
    """Return the times of both sides, from one set of ranks."""
    sides = {name: Side(layout, args, batch, name == "compiled") for name in ("eager", "compiled")}
    seconds = {}
    for name, side in sides.items():
        start = time.perf_counter()
        side.step()
        seconds[name] = time.perf_counter() - start
    samples = interleaved_seconds(
        {name: side.step for name, side in sides.items()},
        num_samples=num_samples,
        calls_per_sample=1,
        warm_up=WARM_UP,
    )
    losses = {name: side.loss for name, side in sides.items()}
    if not abs(losses["compiled"] - losses["eager"]) <= LOSS_TOLERANCE * abs(losses["eager"]):
        raise AssertionError(f"compile_blocks: the losses of {layout} differ after equal steps: {losses}.")
    return {
        "milliseconds": {name: 1e3 * statistics.median(times) for name, times in samples.items()},
        "compiled_over_eager": median_paired_ratio(samples["compiled"], samples["eager"]),
        "compile_seconds": seconds["compiled"],
        "num_graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
    }


def row_of(layout: str, sets: list[dict[str, Any]]) -> dict[str, Any]:
    ratios = [each["compiled_over_eager"] for each in sets]
    times = {name: statistics.median(each["milliseconds"][name] for each in sets) for name in sets[0]["milliseconds"]}
    return {
        "layout": layout,
        "milliseconds": {name: round(value, 3) for name, value in times.items()},
        "compiled_over_eager": round(statistics.median(ratios), 3),
        "ratios_of_sets": [round(ratio, 3) for ratio in ratios],
        "compile_seconds": round(statistics.median(each["compile_seconds"] for each in sets), 1),
        "num_graphs": max(each["num_graphs"] for each in sets),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=LAYOUTS)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=4, help="sequences of a rank's batch")
    parser.add_argument("--sets", type=int, default=3, help="fresh sets of processes")
    parser.add_argument("--samples", type=int, default=7, help="samples of a set")
    parser.add_argument("--json", action="store_true", help="print one JSON object, not a table")
    options = parser.parse_args()
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no pool of further processes beside the ranks
    args = ModelArgs(dim=options.dim, n_layers=options.layers, hidden_dim=3 * options.dim, max_seq_len=options.tokens)
    rows = []
    for layout in options.layouts:
        sets = [
            run_on_ranks(measure, NUM_RANKS, layout, args, options.batch, options.samples, backend="cpu:weft")
            for _ in range(options.sets)
        ]
        rows.append(row_of(layout, sets))
    if options.json:
        sizes = {name: getattr(options, name) for name in ("layers", "dim", "tokens", "batch", "sets", "samples")}
        print(json.dumps({"benchmark": "compile_blocks", "machine": machine_facts(), **sizes, "rows": rows}, indent=2))
        return 0
    print(
        f"{'layout':<14} {'eager ms':>9} {'compiled ms':>12} {'compiled/eager':>15} {'first step s':>13} {'graphs':>7}"
    )
    for row in rows:
        times = row["milliseconds"]
        print(
            f"{row['layout']:<14} {times['eager']:>9.2f} {times['compiled']:>12.2f} {row['compiled_over_eager']:>6.3f} "
            f"{row['compile_seconds']:>13.1f} {row['num_graphs']:>7}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
