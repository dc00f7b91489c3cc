"""Writes a run of benchmarks/memory.py to files: results.json, a Markdown table and a figure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


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
    ranks = "rank 0 with the others pretended" if report["simulated"] else "real ranks"
    return f"{where}, {ranks}, torch {machine['torch']}, {machine['date']}; GB = 1e9 bytes; predicted: of CPU ranks."


def markdown(report: dict[str, Any]) -> str:
    """Return a table with a row for each run, in GB of 1e9 bytes."""
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
        cells += [_gb(row[f"{name}_bytes"]) for name in ("startup", "training", "peak", "predicted")]
        cells += [f"{100 * (row['predicted_bytes'] / row['training_bytes'] - 1):+.2f} %", _gb(row["ideal_bytes"])]
        if is_cuda:
            cells.append(_gb(max(rank["training"]["reserved"] for rank in row["ranks"])))
        lines.append(f"| {' | '.join(cells)} |")
    lines += [f"\nNot measured: {failed['row']}." for failed in report["failed"]]
    return "\n".join(lines) + "\n"


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.4f}" if num_bytes >= 1e7 else f"{num_bytes / 1e9:.6f}"


def draw(report: dict[str, Any], path: Path) -> None:
    """Draw, for each workload, peak bytes against ranks with the ideal 1/n line, and the categories of weft's ranks."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "weft"  # the same figures produce the same file
    from matplotlib import pyplot

    names = list(dict.fromkeys(row["workload"] for row in report["results"]))
    figure, axes = pyplot.subplots(len(names), 2, figsize=(11, 4 * len(names)), squeeze=False)
    for (curves, bars), name in zip(axes, names, strict=True):
        rows = [row for row in report["results"] if row["workload"] == name]
        _draw_curves(curves, rows)
        _draw_categories(bars, rows)
        curves.set_title(f"{name}: peak of a rank")
        bars.set_title(f"{name}: what it is for, weft by default")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _draw_curves(axes: Any, rows: list[dict[str, Any]]) -> None:
    for column in dict.fromkeys(row["column"] for row in rows):
        own = sorted((row["num_ranks"], row["peak_bytes"]) for row in rows if row["column"] == column)
        axes.plot([n for n, _ in own], [size / 1e9 for _, size in own], marker="o", label=column)
    ideal = sorted((row["num_ranks"], row["ideal_bytes"]) for row in rows if row["column"] == "weft")
    axes.plot([n for n, _ in ideal], [size / 1e9 for _, size in ideal], "k--", label="ideal 1/n of weft")
    axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="GB")
    axes.set_xticks([n for n, _ in ideal], [str(n) for n, _ in ideal])
    axes.legend(fontsize="small")


def _draw_categories(axes: Any, rows: list[dict[str, Any]]) -> None:
    own = sorted((row for row in rows if row["column"] == "weft"), key=lambda row: row["num_ranks"])
    if not own:
        return
    usages = [max((rank["training"] for rank in row["ranks"]), key=lambda usage: sum(usage.values())) for row in own]
    labels = [str(row["num_ranks"]) for row in own]
    bottoms = [0.0] * len(own)
    for category in ["allocated"] if "allocated" in usages[0] else usages[0]:  # reserved bytes include allocated ones
        heights = [usage[category] / 1e9 for usage in usages]
        axes.bar(labels, heights, bottom=bottoms, label=category.replace("_", " "))
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    axes.set(xlabel="ranks", ylabel="GB")
    axes.legend(fontsize="small")
