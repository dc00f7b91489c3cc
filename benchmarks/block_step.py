"""A training step of Llama-shaped blocks on one device: weft's plan against eager PyTorch and torch.compile.

    python benchmarks/block_step.py [--model llama-7b] [--blocks 2] [--tokens 4096] [--samples 10] [--json]
                                    [--output FILE] [--trace FILE.json.gz]
    python benchmarks/block_step.py --device cpu --model tiny --tokens 32    # the same on a CPU

A step is forward, mean squared error, backward, and AdamW with torch's fused kernels. The blocks are those of
examples/model.py: norms, attention with rotary positions, SwiGLU. weft's plan is applied on a mesh of one device, so
that nothing communicates and parameters stay plain tensors. Each variant starts from the same weights, and its loss and
the norm of its first gradients must agree with eager's. The steps of a variant are measured in turn with eager's.

`peak_bytes` is what a step allocates beyond parameters and optimizer states: activations, gradients and temporaries.
`launches` and `longest_kernels` are of one profiled step; where the profiler fails, `profiler_error` is its message.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import machine_facts
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

import weft

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from model import Block, ModelArgs, rotary_tables

# Dim, heads, hidden dim.
MODELS = {"tiny": (64, 4, 176), "llama-7b": (4096, 32, 11008), "llama-70b": (8192, 64, 28672)}
PLAN = {"layers.*.attention": "attention", "layers.*.feed_forward": "column_row_mlp"}
VARIANTS = ("eager", "weft", "compiled", "weft_compiled")  # the last two take longest to prepare
NUM_WARM_UP = 3
NUM_KERNELS = 20  # the longest ones, in the report
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 2e-2, 5e-2  # relative, for bfloat16


class Blocks(nn.Module):
    """Blocks of a Llama: `[B, T, D]` -> `[B, T, D]`."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(args) for _ in range(args.n_layers))
        cos, sin = rotary_tables(args.max_seq_len, args.dim // args.n_heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return x


@dataclass(frozen=True)
class Job:
    """Sizes of a measurement."""

    args: ModelArgs
    batch: int
    device: torch.device
    dtype: torch.dtype

    @property
    def num_tokens(self) -> int:
        return self.batch * self.args.max_seq_len

    def batches(self) -> tuple[Tensor, Tensor]:
        """Return input and target `[B, T, D]`, the same at every call."""
        generator = torch.Generator(self.device).manual_seed(1)
        shape = self.batch, self.args.max_seq_len, self.args.dim
        options: dict[str, Any] = {"generator": generator, "device": self.device, "dtype": self.dtype}
        return torch.randn(shape, **options), torch.randn(shape, **options)


class Variant:
    """A model with its optimizer, and a step of it."""

    def __init__(self, name: str, job: Job, batches: tuple[Tensor, Tensor]) -> None:
        torch.manual_seed(0)
        with job.device:
            model = Blocks(job.args).to(job.dtype)
        if name.startswith("weft"):
            mesh = init_device_mesh(job.device.type, (1,), mesh_dim_names=("tensor_parallel",))
            weft.parallelize(model, mesh, PLAN, keeps_plain_on_one_rank=True)
        self.model = model
        self.forward: Callable[[Tensor], Tensor] = torch.compile(model) if name.endswith("compiled") else model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        self.x, self.target = batches

    def loss_and_gradients(self) -> Tensor:
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.forward(self.x), self.target)
        loss.backward()
        return loss.detach()

    def step(self) -> None:
        self.loss_and_gradients()
        self.optimizer.step()

    def first_figures(self) -> tuple[float, float]:
        """Return the loss and the norm of all gradients, before the first update."""
        loss = self.loss_and_gradients().item()
        norms = [parameter.grad.float().norm().item() for parameter in self.model.parameters()]
        return loss, sum(norm**2 for norm in norms) ** 0.5


def seconds_of(step: Callable[[], None], device: torch.device) -> float:
    """Return the seconds from the start of a step on an idle device to its end on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def peak_bytes_of(step: Callable[[], None], variant: Variant, device: torch.device) -> int:
    """Return the bytes that a step allocates beyond those allocated before; 0 on a CPU."""
    variant.optimizer.zero_grad()
    if device.type != "cuda":
        step()
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def profiled(step: Callable[[], None], device: torch.device, trace: Path | None) -> dict[str, Any]:
    """Return the number of kernels of a step and the longest of them (on a CPU: operators); write its trace."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profile(activities=activities) as profiler:
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
    if trace is not None:
        profiler.export_chrome_trace(str(trace))
    on_device = device.type == "cuda"
    rows = [
        (event.key, (event.self_device_time_total if on_device else event.self_cpu_time_total) / 1e3, event.count)
        for event in profiler.key_averages()
        if not event.is_user_annotation  # such as the optimizer's step, whose kernels have separate rows
        and (not on_device or event.device_type == torch.autograd.DeviceType.CUDA)
    ]
    rows.sort(key=lambda row: -row[1])
    longest = [{"name": key[:120], "ms": round(ms, 4), "calls": count} for key, ms, count in rows[:NUM_KERNELS]]
    return {
        "launches": sum(count for _, _, count in rows),
        "device_ms": round(sum(ms for _, ms, _ in rows), 3),
        "longest_kernels": longest,
    }


def measure(name: str, job: Job, eager: Variant | None, num_samples: int) -> tuple[Variant, Any]:
    """Prepare a variant and measure it in turn with eager's steps; return it and its row."""
    batches = job.batches() if eager is None else (eager.x, eager.target)
    start = time.perf_counter()
    variant = Variant(name, job, batches)
    loss, norm = variant.first_figures()
    row: dict[str, Any] = {
        "prepare_seconds": round(time.perf_counter() - start, 1),
        "loss": loss,
        "gradient_norm": norm,
    }
    for _ in range(NUM_WARM_UP):
        variant.step()
    sides = {"eager": eager if eager is not None else variant, name: variant}
    samples: dict[str, list[float]] = {side: [] for side in sides}
    for sample in range(num_samples):
        for side in list(sides) if sample % 2 == 0 else list(sides)[::-1]:
            samples[side].append(seconds_of(sides[side].step, job.device))
    seconds = statistics.median(samples[name])
    ratios = [a / b for a, b in zip(samples["eager"], samples[name], strict=True)]
    row |= {
        "milliseconds": round(seconds * 1e3, 3),
        "eager_milliseconds": round(statistics.median(samples["eager"]) * 1e3, 3),
        "eager_over_this": round(statistics.median(ratios), 3),
        "tokens_per_second": round(job.num_tokens / seconds),
        "peak_bytes": peak_bytes_of(variant.step, variant, job.device),
    }
    return variant, row


def save(report: dict[str, Any], output: Path | None) -> None:
    if output is not None:
        output.write_text(json.dumps(report, indent=2))


def check_agreement(name: str, row: dict[str, Any], eager: dict[str, Any]) -> None:
    for figure, tolerance in (("loss", LOSS_TOLERANCE), ("gradient_norm", GRADIENT_TOLERANCE)):
        if not abs(row[figure] - eager[figure]) <= tolerance * abs(eager[figure]):
            raise AssertionError(f"{name}: {figure} is {row[figure]}, eager's is {eager[figure]}.")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help="cuda, or cpu")
    parser.add_argument("--model", default="llama-7b", choices=MODELS, help="the model whose shapes the blocks have")
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=2, help="sequences of a batch")
    parser.add_argument("--samples", type=int, default=10, help="samples of which a time is the median")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS[1:], default=VARIANTS[1:], help="besides eager")
    parser.add_argument("--json", action="store_true", help="print one JSON object, not a table")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the JSON there after every variant")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write the trace of one step with weft's plan")
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("block_step: got no CUDA device; run it where there is one, or pass --device cpu.", file=sys.stderr)
        return 2
    dim, heads, hidden = MODELS[args.model]
    sizes = ModelArgs(dim=dim, n_layers=args.blocks, n_heads=heads, hidden_dim=hidden, max_seq_len=args.tokens)
    job = Job(sizes, args.batch, device, torch.bfloat16)
    report: dict[str, Any] = {
        "benchmark": "block_step",
        "machine": machine_facts(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "model": args.model,
        "blocks": args.blocks,
        "tokens": job.num_tokens,
        "dtype": "bfloat16",
        "variants": {},
        "failed": {},
    }
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    eager: Variant | None = None
    for name in ("eager", *args.variants):
        row: dict[str, Any] | None = None
        try:
            variant, row = measure(name, job, eager, args.samples)
            report["variants"][name] = row
            eager = eager if eager is not None else variant
            check_agreement(name, row, report["variants"]["eager"])
        except Exception as error:  # the other variants are still measured
            report["failed"][name] = f"{type(error).__name__}: {error}"[:1000]
        save(report, args.output)
        if eager is None:
            break
        if row is not None:
            # Last, because a profiler that the machine does not permit may end the process.
            try:
                row |= profiled(variant.step, job.device, args.trace if name == "weft" else None)
            except Exception as error:
                row["profiler_error"] = f"{type(error).__name__}: {error}"[:300]
            save(report, args.output)
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        print(f"{'variant':<15} {'ms':>9} {'eager/this':>10} {'tokens/s':>10} {'peak GB':>8} {'kernels':>8}")
        for name, row in report["variants"].items():
            print(
                f"{name:<15} {row['milliseconds']:>9.2f} {row['eager_over_this']:>10.3f} "
                f"{row['tokens_per_second']:>10} {row['peak_bytes'] / 1e9:>8.2f} {row.get('launches', '-'):>8}"
            )
    for name, message in report["failed"].items():
        print(f"{name}: {message}", file=sys.stderr)
    dist.destroy_process_group()
    return 1 if report["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
