"""Seconds that verifying plan="auto" adds to the start of a training, for models of Llama's shape.

    python benchmarks/verification.py [--layers 2 32] [--dim 256] [--tp 2 8] [--samples 5] [--json] [--check]

The start of a process includes importing torch, Lightning and weft, building the model and assigning the plan.
Processes with verification and without (`verify="never"`) start in turn. `verification` is the median of the additional
time of the assignment over the samples, `verification_max` is the maximum of that time, and `share` is `verification`
divided by the median start without verification. --check fails if the share is over 2 % for a model of 32 or more
layers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Any

from common import machine_facts

MAX_SHARE = 0.02  # largest share of verification in the start without it, for a model of 32 or more layers


def start(layers: int, dim: int, tp: int, verify: str) -> None:
    """Import, build and assign in this process; print the seconds of the assignment and of the entire start."""
    begin = time.perf_counter()
    import lightning  # noqa: F401
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    import weft.lightning  # noqa: F401
    from weft.strategy import Plan

    torch.set_num_threads(1)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=32_000,
        hidden_size=dim,
        intermediate_size=3 * dim,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
    )
    model = AutoModelForCausalLM.from_config(config)
    before = time.perf_counter()
    Plan("auto", verify=verify).assign(model, tp)
    end = time.perf_counter()
    print(json.dumps({"assign": end - before, "start": end - begin}))


def measure(layers: int, dim: int, tp: int, samples: int) -> dict[str, Any]:
    seconds: dict[str, list[dict[str, float]]] = {"auto": [], "never": []}
    for sample in range(samples):
        for verify in ("auto", "never") if sample % 2 == 0 else ("never", "auto"):
            command = [sys.executable, __file__, "--start", str(layers), str(dim), str(tp), verify]
            run = subprocess.run(command, check=True, capture_output=True, text=True)
            seconds[verify].append(json.loads(run.stdout.splitlines()[-1]))
    additional = [a["assign"] - b["assign"] for a, b in zip(seconds["auto"], seconds["never"], strict=True)]
    start_without = statistics.median(each["start"] for each in seconds["never"])
    return {
        "layers": layers,
        "dim": dim,
        "tp": tp,
        "assign_verified": statistics.median(each["assign"] for each in seconds["auto"]),
        "assign_unverified": statistics.median(each["assign"] for each in seconds["never"]),
        "verification": statistics.median(additional),
        "verification_max": max(additional),
        "start": start_without,
        "share": statistics.median(additional) / start_without,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 32])
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--tp", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--start", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.start:
        layers, dim, tp = map(int, options.start[:3])
        start(layers, dim, tp, options.start[3])
        return 0
    rows = [measure(layers, options.dim, tp, options.samples) for layers in options.layers for tp in options.tp]
    if options.json:
        print(json.dumps({"machine": machine_facts(), "rows": rows}))
    else:
        for row in rows:
            print("  ".join(f"{key} {value:.4g}" for key, value in row.items()))
    too_slow = [row for row in rows if row["layers"] >= 32 and row["share"] > MAX_SHARE]
    return int(options.check and bool(too_slow))


if __name__ == "__main__":
    raise SystemExit(main())
