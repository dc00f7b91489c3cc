"""Draws the pictures of benchmarks: one palette, axes with plain numbers, and SVG files with a title."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# Okabe and Ito (2008), and a grey: distinct for readers with any colour vision.
PALETTE = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C8C8C", "#F0E442"]
# Curves that coincide stay visible: a later style has shorter dashes and longer gaps.
DASHES: list[Any] = ["-", (0, (6, 1)), (0, (4, 2)), (0, (3, 3)), (0, (2, 3)), (0, (1, 2))]
_UNITS = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


def new_pyplot() -> Any:
    """Return pyplot with the palette, set so that equal figures give equal files."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams.update({"svg.hashsalt": "weft", "axes.prop_cycle": matplotlib.cycler(color=PALETTE)})
    matplotlib.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "font.size": 10})
    return pyplot


def readable_bytes(num_bytes: float) -> str:
    """Return 1500000000 as "1.5 GB"; units of 1000."""
    for size, unit in _UNITS:
        if num_bytes >= size:
            return f"{num_bytes / size:g} {unit}"
    return f"{num_bytes:g} B"


def log_byte_axis(axis: Any) -> None:
    """Label a logarithmic axis of bytes with 1, 2 and 5 times powers of ten, as "500 MB"."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: readable_bytes(value)))
    axis.set_minor_formatter(NullFormatter())


def byte_axis(axis: Any) -> None:
    from matplotlib.ticker import FuncFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: readable_bytes(value) if value else "0"))


def save_svg(figure: Any, path: Path, title: str) -> None:
    """Write the figure on white, which is readable in dark mode too, with `title` for screen readers."""
    figure.savefig(path, facecolor="white", metadata={"Date": None, "Title": title})
