"""Draws the layouts that no other beats in both time and memory; those with checkpoints of some blocks are left out."""

from __future__ import annotations

from pathlib import Path

from weft.strategy.tuning.result import FoundLayout, Tuning

_MOST_LABELS = 12


def draw_front(found: Tuning, path: str | Path) -> None:
    """Write an SVG: the predicted step time against the memory of the rank with the most, and the limit.

    Args:
        found: of a search with `finds_front`.

    Raises:
        ValueError: `found` has no front.
        ModuleNotFoundError: matplotlib is not installed.
    """
    if not found.front:
        raise ValueError("tune: there is nothing to draw; search with finds_front=True.")
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("tune: drawing needs matplotlib, which is not installed; install it.") from error
    from matplotlib.figure import Figure

    gigabytes = [layout.peak_bytes / 1e9 for layout in found.front]
    seconds = [layout.step_seconds for layout in found.front]
    # Equal results give equal files; text is stored as text.
    with matplotlib.rc_context({"svg.hashsalt": "weft", "svg.fonttype": "none", "font.size": 8}):
        figure = Figure(figsize=(8, 5), layout="constrained")
        axes = figure.subplots()
        # Between two points, the one with fewer bytes is the fastest that fits.
        axes.step(gigabytes[::-1], seconds[::-1], where="post", color="#8ecae6")
        axes.plot(gigabytes, seconds, "o", color="#219ebc")
        axes.axvline(found.memory_limit / 1e9, color="#8C8C8C", linestyle="--", label="limit")
        for i in range(0, len(found.front), -(-len(found.front) // _MOST_LABELS)):
            point = (gigabytes[i], seconds[i])
            axes.annotate(_label(found.front[i]), point, xytext=(4, 4), textcoords="offset points")
        axes.set(xscale="log", yscale="log", xlabel="memory of a device (GB)", ylabel="predicted step (s)")
        axes.margins(x=0.15)  # for the labels
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter("{x:g}")
        axes.set_title(f"{found.num_devices} devices of {found.cluster}, with checkpoints of all blocks or of none")
        axes.legend(frameon=False)
        figure.savefig(path, format="svg", metadata={"Date": None})


def _label(layout: FoundLayout) -> str:
    checkpoints = "" if layout.activation_checkpointing == "none" else f", {layout.activation_checkpointing}"
    tokens = ", sequence parallel" if layout.sequence_parallel else ""
    return f"{layout.layout}{tokens}{checkpoints}{', in backward' if layout.optimizer_in_backward else ''}"
