"""The loss of the examples' language model after training with each format of optimizer states and weights.

    python benchmarks/optimizer_loss.py [--seeds 3] [--steps 1000] [--formats int8 split8] [--json]

A run trains the small model of examples/03_train_text.py with AdamW, that example's schedule, and batches of 8 x 128
bytes; a seed gives the initial weights and the batches. Its loss is the mean over 64 windows of the text that are the
same for all runs, in nats per byte. Formats with bfloat16 weights are compared with float32 weights under the same
autocast. Runs are divided over the processors; the figures do not depend on the machine's speed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import machine_facts
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from model import ModelArgs, Transformer
from text import Windows, documentation_bytes

from weft.strategy import fuse

BATCH_SIZE, SEQ_LEN, NUM_TESTED, TEST_SEED = 8, 128, 64, 10_000
# name: (optimizer_state, master_weights, whether the model runs under bfloat16 autocast)
FORMATS = {
    "float32": ("float32", "float32", False),
    "bfloat16": ("bfloat16", "float32", False),
    "int8": ("int8", "float32", False),
    "float32, autocast": ("float32", "float32", True),
    "split": ("float32", "split", True),
    "split8": ("float32", "split8", True),
    "int8 and split8": ("int8", "split8", True),
}
BASELINES = {name: "float32, autocast" if FORMATS[name][2] else "float32" for name in FORMATS}


def loss_of(name: str, seed: int, num_steps: int) -> float:
    """Train a model, and return its loss on the tested windows."""
    torch.set_num_threads(1)
    states, weights, has_autocast = FORMATS[name]
    torch.manual_seed(seed)
    model = Transformer(ModelArgs(max_seq_len=SEQ_LEN))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    fuse(optimizer, model, optimizer_state=states, master_weights=weights)
    warm_up = max(1, num_steps // 10)

    def factor(step: int) -> float:
        progress = max(0, step - warm_up) / max(1, num_steps - warm_up)
        return min((step + 1) / warm_up, 0.55 + 0.45 * math.cos(math.pi * progress))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    windows = Windows(documentation_bytes(), num_steps * BATCH_SIZE, SEQ_LEN, seed)
    with _Float32Products() if has_autocast else contextlib.nullcontext():
        _train(model, optimizer, schedule, windows, num_steps, has_autocast)
        tested = Windows(documentation_bytes(), NUM_TESTED, SEQ_LEN, TEST_SEED)
        with torch.no_grad():
            return float(_loss(model, [tested[idx] for idx in range(NUM_TESTED)], has_autocast))


def _train(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LambdaLR,
    windows: Windows,
    num_steps: int,
    has_autocast: bool,
) -> None:
    for step in range(num_steps):
        batch = [windows[idx] for idx in range(step * BATCH_SIZE, (step + 1) * BATCH_SIZE)]
        _loss(model, batch, has_autocast).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


_aten = torch.ops.aten
_PRODUCTS = (
    _aten.mm.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)


class _Float32Products(TorchDispatchMode):
    """Computes products and attention of bfloat16 tensors in float32, and rounds the results.

    These are the numbers of bfloat16 products with float32 sums. On a processor without instructions for them, torch's
    own take 25 times as long.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _PRODUCTS or args[0].dtype != torch.bfloat16:
            return func(*args, **kwargs)
        results = func(*(a.float() if isinstance(a, torch.Tensor) else a for a in args), **kwargs)
        if func is _PRODUCTS[1]:  # the second result, sums of exponentials, is float32 in any case
            return results[0].bfloat16(), results[1]
        return tree_map(torch.Tensor.bfloat16, results)


def _loss(model: torch.nn.Module, batch: list[tuple[torch.Tensor, torch.Tensor]], has_autocast: bool) -> torch.Tensor:
    tokens, targets = (torch.stack(each) for each in zip(*batch, strict=True))
    with torch.autocast("cpu", torch.bfloat16, enabled=has_autocast):
        logits = model(tokens)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    names = list(dict.fromkeys([*(BASELINES[name] for name in args.formats), *args.formats]))
    jobs = [(name, seed, args.steps) for name in names for seed in range(args.seeds)]
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        losses = list(pool.map(loss_of, *zip(*jobs, strict=True)))
    by_name = {name: [loss for job, loss in zip(jobs, losses, strict=True) if job[0] == name] for name in names}
    if args.json:
        print(json.dumps({"steps": args.steps, "losses": by_name, **machine_facts()}))
        return
    print(f"{'format':20} {'mean':>8} {'lowest':>8} {'highest':>8}  mean - mean of the baseline")
    for name, values in by_name.items():
        difference = statistics.mean(values) - statistics.mean(by_name[BASELINES[name]])
        print(f"{name:20} {statistics.mean(values):8.4f} {min(values):8.4f} {max(values):8.4f}  {difference:+.4f}")


if __name__ == "__main__":
    main()
