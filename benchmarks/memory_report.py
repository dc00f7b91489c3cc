"""Writes a run of benchmarks/memory.py to files: results.json, a Markdown table and a figure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pictures import DASHES, PALETTE, byte_axis, log_byte_axis, new_pyplot, save_svg

# The names, in pictures, of the workloads and columns of benchmarks/memory.py.
WORKLOADS = {
    "feed_forward": "Lightning's FeedForward(8192, 8192)",
    "activations": "FeedForward(1024, 4096), 8,192 tokens",
    "language_model": "Language model",
}
COLUMNS = {
    "stock": "Lightning's ModelParallelStrategy",
    "stock_meta": "the same, model built on meta",
    "weft": "weft",
    "weft_in_backward": "weft, optimizer in the backward",
    "weft_by_rows": "weft, optimizer in the backward by rows",
    "weft_int8": "weft, by rows, 8-bit states",
    "weft_int8_split8": "weft, by rows, 8-bit states, split weights",
    "weft_own_optimizer": "weft, unfused optimizer",
    "weft_recompute": "weft, operators recompute",
    "weft_selective": "weft, selective checkpointing",
    "weft_checkpointed": "weft, full checkpointing",
}


def write_report(report: dict[str, Any], folder: Path) -> None:
    """Write results.json, table.md and memory.svg."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(report, indent=1) + "\n")
    (folder / "table.md").write_text(markdown(report))
    draw(report, folder / "memory.svg")


def source_of(report: dict[str, Any]) -> str:
    """Return a line on the machine and the conditions of the figures."""
    machine = report["machine"]
    where = machine["cpu"]
    if report["device"] == "cuda":
        workspace = machine["cublas_workspace"]
        where = f"{machine['gpu']} (driver {machine['driver']}, CUBLAS_WORKSPACE_CONFIG={workspace})"
    ranks = "rank 0 with the others simulated" if report["simulated"] else "real ranks"
    return f"{where}, {ranks}, torch {machine['torch']}, {machine['date']}; GB = 1e9 bytes; predicted: of CPU ranks."


def markdown(report: dict[str, Any]) -> str:
    """Return a table with a row for each run, in GB of 1e9 bytes; the error is that of predicted against training."""
    header = ["workload", "column", "ranks", "start-up", "training", "peak", "predicted", "error", "ideal"]
    is_cuda = report["device"] == "cuda"
    if is_cuda:
        header.append("reserved")
    lines = [
        source_of(report),
        "",
        f"| {' | '.join(header)} |",
        f"|{'---|' * len(header)}",
    ]
    for row in report["results"]:
        cells = [row["workload"], row["column"], str(row["num_ranks"])]
        cells += [gigabytes(row[f"{name}_bytes"]) for name in ("startup", "training", "peak", "predicted")]
        cells += [f"{100 * (row['predicted_bytes'] / row['training_bytes'] - 1):+.2f} %", gigabytes(row["ideal_bytes"])]
        if is_cuda:
            cells.append(gigabytes(max(rank["training"]["reserved"] for rank in row["ranks"])))
        lines.append(f"| {' | '.join(cells)} |")
    lines += [f"\nNot measured: {failed['row']}." for failed in report["failed"]]
    return "\n".join(lines) + "\n"


def gigabytes(num_bytes: int) -> str:
    """Return a number of bytes in GB, as in the tables."""
    return f"{num_bytes / 1e9:.4f}" if num_bytes >= 1e7 else f"{num_bytes / 1e9:.6f}"


def draw(report: dict[str, Any], path: Path) -> None:
    """Draw, by workload, peaks against ranks with the ideal 1/n line, and the training peak of "weft" by category."""
    pyplot = new_pyplot()
    names = list(dict.fromkeys(row["workload"] for row in report["results"]))
    figure, axes = pyplot.subplots(
        len(names), 2, figsize=(13, 4 * len(names)), squeeze=False, gridspec_kw={"width_ratios": [3, 2]}
    )
    for (curves, bars), name in zip(axes, names, strict=True):
        rows = [row for row in report["results"] if row["workload"] == name]
        _draw_curves(curves, rows)
        _draw_categories(bars, rows)
        workload = WORKLOADS.get(name, name)
        curves.set_title(f"{workload}\npeak of a rank")
        bars.set_title(f"{workload}\ncategories at the peak of weft")
    figure.tight_layout()
    save_svg(figure, path, "Peak memory of a rank against the number of ranks, and its categories, by workload")
    pyplot.close(figure)


def _draw_curves(axes: Any, rows: list[dict[str, Any]]) -> None:
    columns = list(dict.fromkeys(row["column"] for row in rows))
    for position, column in enumerate(columns):
        color = PALETTE[list(COLUMNS).index(column) % len(PALETTE)]  # the same for all workloads
        own = sorted((row["num_ranks"], row["peak_bytes"]) for row in rows if row["column"] == column)
        style = {"linestyle": DASHES[position % len(DASHES)], "marker": "o", "markersize": 4}
        # Earlier curves are wider, so that they show on both sides of a later curve with the same points.
        width = 1.2 + 0.5 * (len(columns) - position)
        axes.plot(*zip(*own, strict=True), label=COLUMNS.get(column, column), color=color, linewidth=width, **style)
    ideal = sorted((row["num_ranks"], row["ideal_bytes"]) for row in rows if row["column"] == "weft")
    axes.plot(*zip(*ideal, strict=True), "k:", linewidth=1, label="ideal: weft on one rank, divided by the ranks")
    axes.set(xscale="log", yscale="log", xlabel="ranks")
    axes.set_xticks([n for n, _ in ideal], [str(n) for n, _ in ideal])
    axes.minorticks_off()
    log_byte_axis(axes.yaxis)
    _draw_legend(axes)


def _draw_categories(axes: Any, rows: list[dict[str, Any]]) -> None:
    own = sorted((row for row in rows if row["column"] == "weft"), key=lambda row: row["num_ranks"])
    if not own:
        return
    usages = [max((rank["training"] for rank in row["ranks"]), key=lambda usage: sum(usage.values())) for row in own]
    labels = [str(row["num_ranks"]) for row in own]
    bottoms = [0] * len(own)
    for category in ["allocated"] if "allocated" in usages[0] else usages[0]:  # reserved bytes include allocated ones
        heights = [usage[category] for usage in usages]
        axes.bar(labels, heights, bottom=bottoms, label=category.replace("_", " "))
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    axes.set(xlabel="ranks")
    byte_axis(axes.yaxis)
    _draw_legend(axes, reverse=True)  # in the order of the bars, from top to bottom


def _draw_legend(axes: Any, **options: Any) -> None:
    """Draw the legend to the right of the axes, where it hides no curve."""
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, **options)
