"""Measures stages for `tune`, which chooses a schedule and micro-batches; formats and draws the results of `tune`."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from weft.strategy._plan import LinearTime, MeasuredTime, StageProfile, TunePoint, deal_samples
from weft.strategy.pipeline.micro_batches import batch_size_of, first_samples
from weft.strategy.pipeline.profile import LayerProfile, profile_layers


def profile_stages(
    model: nn.Module,
    batch: Any,
    loss_fn: Callable[[Any], Tensor],
    cuts: Sequence[str],
    *,
    sizes: Sequence[int] | None = None,
    transfer: LinearTime | MeasuredTime | None = None,
    state_factor: float = 4.0,
    repeats: int = 3,
) -> list[StageProfile]:
    """Measure an unsharded model at several micro-batch sizes; return the costs of its stages, for `tune`.

    Args:
        model: unsharded, on its device.
        batch: its first samples make the micro-batches of `sizes`.
        loss_fn: as for `Pipeline.step`.
        cuts: the first layer of each stage but the first, by its name in the result of `profile_layers`.
        sizes: the micro-batch sizes to measure, in samples. Default: an eighth, a quarter, a half and all of the batch.
            Smaller micro-batches are assumed to take as long as the smallest size.
        transfer: the time of each boundary's transfer. Default: no time.
        state_factor: bytes of parameters, gradients and optimizer states for each byte of parameters; 4 is Adam's.
        repeats: see `profile_layers`.

    The gradients of inputs and those of weights are assumed to take half of a backward each.

    Raises:
        ValueError: no layer begins at a cut; see `profile_layers`.
    """
    samples = batch_size_of(batch)
    chosen = sorted(set(sizes or (max(1, samples // divisor) for divisor in (8, 4, 2, 1))))
    measured = [profile_layers(model, first_samples(batch, size), loss_fn, repeats=repeats) for size in chosen]
    names = [layer.name for layer in measured[0]]
    missing = [cut for cut in cuts if cut not in names]
    if missing:
        raise ValueError(f"pipeline: the cut {missing[0]!r} is not a measured layer; cut at one of {names}.")
    begins = [0, *(names.index(cut) for cut in cuts), len(names)]
    stages = []
    for begin, end in itertools.pairwise(begins):
        stage_layers = [layers[begin:end] for layers in measured]
        half = MeasuredTime(chosen, [_sum(layers, "backward") / 2 for layers in stage_layers])
        stages.append(
            StageProfile(
                forward=MeasuredTime(chosen, [_sum(layers, "forward") for layers in stage_layers]),
                backward_input=half,
                backward_weight=half,
                transfer=transfer or LinearTime(),
                activation_bytes_per_sample=round(_sum(stage_layers[-1], "activation_bytes") / chosen[-1]),
                parameter_bytes=round(state_factor * _sum(stage_layers[-1], "parameter_bytes")),
            )
        )
    return stages


def _sum(layers: Sequence[LayerProfile], what: str) -> float:
    total: float = sum(getattr(layer, what) for layer in layers)
    return total


def tuning_table(points: Sequence[TunePoint]) -> str:
    """Return a header and one line for each point, in their order."""
    sizes = [_sizes_text(point.micro_batch_sizes) for point in points]
    width = max(map(len, sizes), default=0)
    head = f"{'schedule':<12} {'micro-batches':>13} {'time':>10} {'idle':>6} {'most bytes':>12}"
    lines = [f"{head}  {'samples':<{width}}".rstrip()]
    for point, text in zip(points, sizes, strict=True):
        line = f"{point.kind:<12} {point.num_micro_batches:>13} {point.makespan:>10.4g} {point.bubble_fraction:>6.0%}"
        line = f"{line} {point.peak_bytes:>12}  {text:<{width}}"
        lines.append(line.rstrip() if point.fits else f"{line}  too many bytes")
    return "\n".join(lines)


def _sizes_text(sizes: Sequence[int]) -> str:
    """Return the sizes in order, with runs of equal sizes counted: "4, 3 x 8, 4"."""
    runs = [(size, len(list(run))) for size, run in itertools.groupby(sizes)]
    return ", ".join(str(size) if count == 1 else f"{count} x {size}" for size, count in runs)


def _is_tapered(point: TunePoint) -> bool:
    sizes = point.micro_batch_sizes
    return sizes != deal_samples(sum(sizes), [1.0] * len(sizes))


def draw_tuning(points: Sequence[TunePoint], *, path: str | Path | None = None) -> str:
    """Draw a step's time against the number of micro-batches, a line for each schedule; return the SVG.

    Tapered micro-batches, whose sizes are not even, have a separate, dashed line. Points above the memory limit are
    hollow. The SVG is also written to `path`, if given.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: there are no points.
    """
    if not points:
        raise ValueError("draw_tuning: there are no points to draw; pass the result of tune.")
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("draw_tuning needs matplotlib, which is not installed; install it.") from error
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "weft", "svg.fonttype": "none", "font.size": 8}):
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        for kind, is_tapered in dict.fromkeys((point.kind, _is_tapered(point)) for point in points):
            series = [point for point in points if (point.kind, _is_tapered(point)) == (kind, is_tapered)]
            series.sort(key=lambda point: point.num_micro_batches)
            label, style = (f"{kind}, tapered", "--") if is_tapered else (kind, "-")
            [line] = axes.plot([p.num_micro_batches for p in series], [p.makespan for p in series], style, label=label)
            for point in series:
                face = line.get_color() if point.fits else "white"
                marker: dict[str, Any] = {"marker": "o", "markerfacecolor": face, "markeredgecolor": line.get_color()}
                axes.plot(point.num_micro_batches, point.makespan, **marker)
        counts = sorted({point.num_micro_batches for point in points})
        axes.set_xscale("log")
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.minorticks_off()
        axes.set(xlabel="micro-batches", ylabel="time of a step")
        axes.set_ylim(bottom=0)
        axes.legend()
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    if path is not None:
        Path(path).write_text(buffer.getvalue())
    return buffer.getvalue()
