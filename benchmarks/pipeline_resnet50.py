"""Seconds of a training step of torchvision's ResNet-50 on 2 ranks of one thread: weft's pipeline against others.

    python benchmarks/pipeline_resnet50.py [--samples 7] [--json] [--check] [--curve FILE.svg]

A step is forward, backward and SGD on a batch of 32 images of 128 x 128. One run measures in turn: one process, with
the full batch and in micro-batches; a naive split, two stages without micro-batches; for several numbers of
micro-batches, weft's schedules and those of torch.distributed.pipelining (on gloo, and on weft's backend), all cut at
the same layer; and weft's zero-bubble with smaller first and last micro-batches.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import interleaved_seconds, machine_facts, median_paired_ratio, run_on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torchvision.models import resnet50

from weft.strategy.pipeline import Pipeline, balanced_cuts, profile_layers
from weft.strategy.pipeline.micro_batches import split_batch

BATCH, SIZE, NUM_CLASSES = 32, 128, 1000
COUNTS = (2, 4, 8, 16)  # numbers of micro-batches
TAPERED = ((8, 16, 8), (4, 12, 12, 4))  # batches split into micro-batches of these sizes
WEFT_SCHEDULES = ("gpipe", "1f1b", "zero_bubble")
TORCH_SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
# The limits of --check: the least speed of weft's fastest schedule relative to one process, and to torch's fastest; the
# speed of the naive split relative to one process may differ from 1 by NAIVE_WITHIN.
MIN_OVER_ONE, MIN_OVER_TORCH, NAIVE_WITHIN = 1.75, 0.98, 0.1

Step = Callable[[], None]


def images() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, 3, SIZE, SIZE, generator=generator)
    return x, torch.randint(0, NUM_CLASSES, (BATCH,), generator=generator)


def full_model() -> nn.Module:
    torch.manual_seed(0)
    return resnet50()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def stepping(model: nn.Module, forward_backward: Callable[[], Any]) -> Step:
    optimizer = optimizer_of(model)

    def step() -> None:
        optimizer.zero_grad()
        forward_backward()
        optimizer.step()

    return step


def name_of(sizes: Sequence[int]) -> str:
    return " + ".join(map(str, sizes))


def even_sizes(count: int) -> list[int]:
    return [len(micro_batch) for micro_batch in split_batch(torch.empty(BATCH), count)]


def one_process(sizes: Sequence[int]) -> Step:
    """Return the step of rank 0, in micro-batches of these sizes; on rank 1, a function that does nothing."""
    if dist.get_rank() != 0:
        return lambda: None
    model = full_model()
    x, y = images()

    def forward_backward() -> None:
        for xs, ys in zip(x.split(list(sizes)), y.split(list(sizes)), strict=True):
            (F.cross_entropy(model(xs), ys) * (len(xs) / BATCH)).backward()

    return stepping(model, forward_backward)


def weft_steps(
    kind: str, cuts: list[str], counts: tuple[int, ...], shares: Sequence[int] | None = None
) -> dict[int, Step]:
    """Return a step for each number of micro-batches; `kind`: the schedule; `shares`: relative micro-batch sizes."""
    model = full_model()
    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))
    pipeline = Pipeline(model, mesh, cuts, schedule=kind, micro_batch_shares=shares)
    batch = images()

    def forward_backward(count: int) -> None:
        if shares is None:
            pipeline.num_micro_batches = count
        pipeline.step(batch, lambda micro_batch: F.cross_entropy(model(micro_batch[0]), micro_batch[1]))

    return {count: stepping(model, lambda count=count: forward_backward(count)) for count in counts}


def torch_steps(kind: str, cuts: list[str], counts: tuple[int, ...], group: dist.ProcessGroup) -> dict[int, Step]:
    rank = dist.get_rank()
    module = split_at(full_model(), cuts[0])[rank]
    x, y = images()
    steps = {}
    for count in counts:
        stage = PipelineStage(module, rank, 2, torch.device("cpu"), group=group)
        schedule = TORCH_SCHEDULES[kind](stage, n_microbatches=count, loss_fn=F.cross_entropy)
        call = (
            (lambda schedule=schedule: schedule.step(x))
            if rank == 0
            else (lambda schedule=schedule: schedule.step(target=y, losses=[]))
        )
        steps[count] = stepping(module, call)
    return steps


def split_at(model: nn.Module, cut: str) -> tuple[nn.Module, nn.Module]:
    """Return a ResNet's layers before the cut, and its layers from the cut on, as two nn.Sequential."""
    flat: list[tuple[str, nn.Module]] = []
    for name, child in model.named_children():
        if isinstance(child, nn.Sequential):
            flat += [(f"{name}.{inner}", module) for inner, module in child.named_children()]
        else:
            flat.append((name, child))
    flat.insert([name for name, _ in flat].index("fc"), ("flatten", nn.Flatten()))
    begin = [name for name, _ in flat].index(cut)
    modules = [module for _, module in flat]
    return nn.Sequential(*modules[:begin]), nn.Sequential(*modules[begin:])


def cuts_of_measured_layers() -> list[str]:
    model, (x, y) = full_model(), images()
    profiles = profile_layers(model, (x[:4], y[:4]), lambda batch: F.cross_entropy(model(batch[0]), batch[1]))
    return balanced_cuts(profiles, 2)


def measure(num_samples: int, counts: tuple[int, ...]) -> dict[str, Any]:
    """Return the cuts, and the seconds of each candidate by sample; collective."""
    gloo = dist.new_group(backend="gloo")
    chosen = [cuts_of_measured_layers()]
    dist.broadcast_object_list(chosen)
    cuts = chosen[0]
    steps: dict[str, Step] = {"one process": one_process([BATCH])}
    steps |= {f"one process, {count}": one_process(even_sizes(count)) for count in counts}
    steps |= {f"one process, {name_of(sizes)}": one_process(sizes) for sizes in TAPERED}
    steps["naive split"] = weft_steps("naive", cuts, (1,))[1]
    for kind in WEFT_SCHEDULES:
        steps |= {f"weft {kind}, {count}": step for count, step in weft_steps(kind, cuts, counts).items()}
    for sizes in TAPERED:
        steps[f"weft zero_bubble, {name_of(sizes)}"] = weft_steps("zero_bubble", cuts, (len(sizes),), sizes)[len(sizes)]
    for kind in TORCH_SCHEDULES:
        for backend, group in (("gloo", gloo), ("weft", dist.group.WORLD)):
            made = torch_steps(kind, cuts, counts, group)
            steps |= {f"torch {kind} on {backend}, {count}": step for count, step in made.items()}
    seconds = interleaved_seconds(steps, num_samples=num_samples, calls_per_sample=1, warm_up=1)
    return {"cuts": cuts, "seconds": seconds}


def summary(measured: dict[str, Any]) -> dict[str, Any]:
    seconds = measured["seconds"]
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    best = {who: min((n for n in medians if n.startswith(who)), key=medians.__getitem__) for who in ("weft", "torch")}
    count = best["weft"].rpartition(", ")[2]
    one = seconds["one process"]

    def speed(name: str, other: str = "one process") -> float:
        return medians[other] / medians[name]

    return {
        "machine": machine_facts(),
        "cuts": measured["cuts"],
        "best": best,
        "speed over one process": {name: speed(name) for name in seconds},
        "seconds": medians,
        "best of weft over one process": speed(best["weft"]),
        "best of weft over one process of its micro-batches": speed(best["weft"], f"one process, {count}"),
        "best of weft over best of torch": speed(best["weft"], best["torch"]),
        "naive split over one process": speed("naive split"),
        "best of weft over one process, by pairs": median_paired_ratio(one, seconds[best["weft"]]),
        "best of weft over best of torch, by pairs": median_paired_ratio(seconds[best["torch"]], seconds[best["weft"]]),
        "samples": len(one),
    }


def draw_curve(result: dict[str, Any], path: Path) -> None:
    """Draw the speed over one process against the number of micro-batches, a line for each schedule."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    lines: dict[str, list[tuple[int, float]]] = {}
    for name, speed in result["speed over one process"].items():
        who, _, sizes = name.partition(", ")
        if sizes:
            parts = sizes.split(" + ")
            is_tapered = len(parts) > 1
            point = (len(parts) if is_tapered else int(sizes), speed)
            lines.setdefault(f"{who}, tapered" if is_tapered else who, []).append(point)
    figure, axes = plt.subplots(figsize=(7, 4))
    for who, points in lines.items():
        style = "-" if who.startswith("weft") else "--" if who.startswith("torch") else ":"
        axes.plot(*zip(*sorted(points), strict=True), style, marker="o", markersize=3, label=who)
    axes.axhline(result["naive split over one process"], color="grey", linewidth=0.8, label="naive split")
    axes.set(xscale="log", xlabel="micro-batches", ylabel="speed over one process (batch 32 at once)")
    axes.set_xticks(COUNTS, [str(count) for count in COUNTS])
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=7)
    parser.add_argument("--counts", type=int, nargs="+", default=list(COUNTS), help="numbers of micro-batches")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a limit is missed")
    parser.add_argument("--curve", type=Path, help="write the curve of speed against micro-batches here")
    arguments = parser.parse_args()
    measured = run_on_ranks(
        measure, 2, arguments.samples, tuple(arguments.counts), timeout_seconds=3000, backend="cpu:weft"
    )
    result = summary(measured)
    if arguments.curve:
        draw_curve(result, arguments.curve)
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        for name, speed in result["speed over one process"].items():
            print(f"{name:32} {result['seconds'][name]:7.3f} s  {speed:5.2f} x one process")
        for key in ("best", "cuts", *(k for k in result if k.startswith(("best of", "naive")))):
            print(f"{key}: {result[key]}")
    good = (
        result["best of weft over one process"] >= MIN_OVER_ONE
        and result["best of weft over best of torch"] >= MIN_OVER_TORCH
        and abs(result["naive split over one process"] - 1) <= NAIVE_WITHIN
    )
    return 0 if good or not arguments.check else 1


if __name__ == "__main__":
    sys.exit(main())
