"""The report of latency.py: percentiles over process sets, limits, tables and histograms."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

from collectives import KIB, MIB

BACKENDS = ("weft", "gloo")
CONDITIONS = ("back_to_back", "skewed", "busy", "apart", "together")
# Limits of an all-reduce by weft, in microseconds: ranks -> condition -> bytes -> (percentile, limit).
MAX_MICROSECONDS = {
    2: {"back_to_back": {4 * KIB: (50, 15.0)}, "skewed": {4 * KIB: (50, 20.0)}, "busy": {4 * KIB: (50, 60.0)}},
    4: {"back_to_back": {4 * KIB: (50, 80.0)}, "skewed": {4 * KIB: (50, 200.0)}},
}
# Limits of a set, and the share of sets that must be within them: an all-reduce of 4 KiB on 2 ranks, back to back.
SET_LIMITS, LEAST_SHARE = {50: 15.0, 99: 60.0}, 0.95
# The least ratio of medians gloo / weft of an all-reduce, back to back and skewed: ranks -> bytes.
MIN_RATIOS = {2: {256 * KIB: 15.0, 4 * MIB: 5.0}, 4: {256 * KIB: 10.0, 4 * MIB: 4.0}}


def percentile(values: list[float], percent: int) -> float:
    """Return the least value that `percent` % of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-percent * len(ordered) // 100) - 1)]


def combine(num_ranks: int, sets: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return, row by row, the percentiles over all calls of all sets."""
    combined = []
    for same in zip(*sets, strict=True):
        row: dict[str, Any] = {"num_ranks": num_ranks}
        row |= {name: same[0][name] for name in ("condition", "call", "num_bytes")}
        for backend in BACKENDS:
            sides = [each[backend] for each in same]
            every = [value for side in sides for value in side["us"]]
            medians = [statistics.median(side["us"]) for side in sides]
            row[backend] = {f"p{percent}": percentile(every, percent) for percent in (50, 90, 99)}
            row[backend] |= {"max": max(every), "num_calls": len(every)}
            row[backend]["medians_of_sets"] = [min(medians), max(medians)]
            row[backend]["shared"] = round(statistics.mean(side["shared"] for side in sides), 3)
            kinds = zip(*(side["switches"] for side in sides), strict=True)
            row[backend]["switches"] = [round(statistics.mean(kind), 2) for kind in kinds]
            row[backend]["histogram"] = histogram(every)
        row["gloo_over_weft"] = round(row["gloo"]["p50"] / row["weft"]["p50"], 2)
        within = [all(percentile(each["weft"]["us"], p) <= most for p, most in SET_LIMITS.items()) for each in same]
        row["sets_within"] = [sum(within), len(within)]
        combined.append(row)
    return combined


def histogram(microseconds: list[float]) -> dict[str, int]:
    """Return the number of calls by the lower bound of their bin, in microseconds; four bins for each factor of two."""
    counts: dict[int, int] = {}
    for value in microseconds:
        idx = math.floor(math.log2(max(value, 0.125)) * 4)
        counts[idx] = counts.get(idx, 0) + 1
    return {f"{2.0 ** (idx / 4):.3g}": counts[idx] for idx in sorted(counts)}


def failures(rows: list[dict[str, Any]]) -> list[str]:
    """Return the limits that are missed, one sentence each."""
    found = []
    for row in rows:
        if row["call"] != "all_reduce":
            continue
        ranks, condition, num_bytes = row["num_ranks"], row["condition"], row["num_bytes"]
        what = f"all_reduce of {num_bytes} bytes on {ranks} ranks, {condition}"
        limit = MAX_MICROSECONDS.get(ranks, {}).get(condition, {}).get(num_bytes)
        if limit is not None and row["weft"][f"p{limit[0]}"] > limit[1]:
            found.append(f"{what}: P{limit[0]} is {row['weft'][f'p{limit[0]}']} us, wanted at most {limit[1]:g}.")
        least = MIN_RATIOS.get(ranks, {}).get(num_bytes, 0.0) if condition in ("back_to_back", "skewed") else 0.0
        if row["gloo_over_weft"] < least:
            found.append(f"{what}: gloo / weft is {row['gloo_over_weft']}, wanted at least {least:g}.")
        num_within, num_sets = row["sets_within"]
        if (ranks, condition, num_bytes) == (2, "back_to_back", 4 * KIB) and num_within < LEAST_SHARE * num_sets:
            limits = " and ".join(f"P{percent} of {most:g} us" for percent, most in SET_LIMITS.items())
            found.append(f"{what}: {num_within} of {num_sets} sets are within {limits}, wanted {LEAST_SHARE:.0%}.")
    return found


def draw(rows: list[dict[str, Any]], folder: Path) -> None:
    """Write latency_N_CALL.svg for each number of ranks and collective: a histogram for each size and condition."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
    from pictures import DASHES, PALETTE, new_pyplot, save_svg

    folder.mkdir(parents=True, exist_ok=True)
    pyplot = new_pyplot()
    for num_ranks, call in sorted({(row["num_ranks"], row["call"]) for row in rows}):
        shown = [row for row in rows if (row["num_ranks"], row["call"]) == (num_ranks, call)]
        sizes = sorted({row["num_bytes"] for row in shown})
        conditions = [condition for condition in CONDITIONS if any(row["condition"] == condition for row in shown)]
        figure, axes = pyplot.subplots(
            len(sizes),
            len(conditions),
            figsize=(2.6 * len(conditions), 0.4 + 1.5 * len(sizes)),
            squeeze=False,
            sharex="row",
            layout="constrained",
        )
        for row in shown:
            axis = axes[sizes.index(row["num_bytes"])][conditions.index(row["condition"])]
            for idx, backend in enumerate(BACKENDS):
                edges, shares = _steps(row[backend]["histogram"], row[backend]["num_calls"])
                axis.step(edges, shares, where="post", color=PALETTE[idx], linestyle=DASHES[idx], label=backend)
            axis.set_xscale("log")
            axis.xaxis.set_major_locator(LogLocator(base=10))
            axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.12g}"))
            axis.xaxis.set_minor_locator(NullLocator())
            axis.tick_params(labelsize=7)
        for axis, condition in zip(axes[0], conditions, strict=True):
            axis.set_title(condition.replace("_", " "), fontsize=9)
        for axis, num_bytes in zip(axes[:, 0], sizes, strict=True):
            axis.set_ylabel(f"{readable_size(num_bytes)}, % of calls" if num_bytes else "% of calls", fontsize=8)
        for axis in axes[-1]:
            axis.set_xlabel("microseconds", fontsize=8)
        axes[0][0].legend(fontsize=7, frameon=False)
        title = f"Histograms of the microseconds of {call} on {num_ranks} ranks: weft and gloo, by size and condition"
        save_svg(figure, folder / f"latency_{num_ranks}_{call}.svg", title)
        pyplot.close(figure)


def _steps(counts: dict[str, int], num_calls: int) -> tuple[list[float], list[float]]:
    """Return the lower bounds of all bins from the first to the last one, and their percentages; then a bin of 0."""
    of_bins = {round(math.log2(float(lower)) * 4): count for lower, count in counts.items()}
    bins = range(min(of_bins), max(of_bins) + 2)
    return [2.0 ** (idx / 4) for idx in bins], [100 * of_bins.get(idx, 0) / num_calls for idx in bins]


def readable_size(num_bytes: int) -> str:
    """Return 4096 as "4 KiB"; "-" for a call without data."""
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes // unit} {name}"
    return f"{num_bytes} B" if num_bytes else "-"


def print_table(report: dict[str, Any], details: bool = False) -> None:
    """Print Markdown tables, one for each number of ranks.

    Args:
        details: a row for each condition, with all figures. Otherwise a row for each collective and size, with weft's
            P50 and P99 in microseconds and the ratio of the medians gloo / weft for each condition.
    """
    machine = report["machine"]
    print(f"{machine['cpu']}, {machine['cpus_usable']} cores, torch {machine['torch']}, {machine['date']}")
    rows = report["results"]
    for num_ranks in sorted({row["num_ranks"] for row in rows}):
        print(f"\n### {num_ranks} ranks\n")
        of_ranks = [row for row in rows if row["num_ranks"] == num_ranks]
        _print_details(of_ranks) if details else _print_conditions(of_ranks)


def _print_conditions(rows: list[dict[str, Any]]) -> None:
    conditions = [condition for condition in CONDITIONS if any(row["condition"] == condition for row in rows)]
    cells: dict[tuple[str, int], dict[str, str]] = {}
    for row in rows:
        figures = f"{row['weft']['p50']:,.0f}, {row['weft']['p99']:,.0f}; {row['gloo_over_weft']:.1f} x"
        cells.setdefault((row["call"], row["num_bytes"]), {})[row["condition"]] = figures
    columns = ["call", "size", *(condition.replace("_", " ") for condition in conditions)]
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for (call, num_bytes), by_condition in cells.items():
        figures = " | ".join(by_condition[condition] for condition in conditions)
        print(f"| {call} | {readable_size(num_bytes)} | {figures} |")


def _print_details(rows: list[dict[str, Any]]) -> None:
    columns = [
        *("call", "size", "condition", "P50", "P90", "P99", "maximum", "medians of sets", "one processor", "switches"),
        *("gloo P50", "gloo P99", "gloo / weft"),
    ]
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for row in rows:
        ours, gloo = row["weft"], row["gloo"]
        cells = [
            *(row["call"], readable_size(row["num_bytes"]), row["condition"].replace("_", " ")),
            *(f"{ours[name]:,.1f}" for name in ("p50", "p90", "p99", "max")),
            f"{ours['medians_of_sets'][0]:,.1f} to {ours['medians_of_sets'][1]:,.1f}",
            f"{ours['shared']:.0%}",
            f"{ours['switches'][0]} + {ours['switches'][1]}",
            *(f"{gloo['p50']:,.1f}", f"{gloo['p99']:,.1f}", f"{row['gloo_over_weft']:.1f}"),
        ]
        print(f"| {' | '.join(cells)} |")
