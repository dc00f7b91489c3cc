"""Predicted against measured step times of all layouts of small models: does `weft tune` choose a fast one?

    python benchmarks/tune.py [--models text_small ...] [--ranks 2 4 8] [--rounds 3] [--json] [--check]
                              [--zero-stages 3 2 1] [--pipelines] [--memory-of chosen]
                              [--network ranks_per_host=2,seconds_per_message=1e-3,bytes_per_second=1e8]

For each model and number of CPU ranks, `tune_module` predicts the time and the memory of every layout: replicas x
data-parallel (with the given ZeRO stages) x tensor-parallel ranks, for the same global batch; with --pipelines, also x
pipeline ranks, each with the number of micro-batches that is predicted to be the fastest. Then each layout trains
under the Trainer with weft's strategy, in fresh sets of processes, one layout after another, several rounds; the time
of a layout is the median over the rounds of the median step. The links and the cost of an operator come from
`profile_host`, on the same ranks.

With --network, groups of ranks of several "hosts" are as slow as that network (`weft.collectives.SlowNetwork`), and the
prediction knows its rates.

--check: the chosen layout is at most 10 % slower than the fastest in nine tenths of the cases, and never above 25 %.
No layout takes more than 2 % above the predicted memory.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
import time
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from common import machine_facts
from process_sets import ProcessSet
from torch.utils.data import DataLoader
from tune_models import MODELS

import weft
import weft.strategy.apply  # strategies load these modules at first use; forked ranks inherit them
import weft.strategy.data_parallel
import weft.strategy.full_results
import weft.strategy.verification.decide
from weft.collectives import SlowNetwork
from weft.lightning import MemoryMonitor, WeftModelParallelStrategy
from weft.strategy.dry_run.batches import with_rows
from weft.strategy.tuning import FoundLayout, tune_module
from weft.strategy.tuning.profile import profile_host

NUM_WARM_UP = 2  # steps; the first creates the optimizer's states
SAMPLES, MIN_SECONDS = 3, 0.5  # samples of a set of processes, and the least duration of a sample
SLOWER_MOSTLY, SLOWER_NEVER, MOSTLY = 1.10, 1.25, 0.9
MEMORY_BOUND = 0.02


class _StepServer(L.Callback):
    """Receives a number of steps, lets the Trainer run as many, sends their seconds, and receives again."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._num_left = 0
        self._start = 0.0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if self._num_left == 0:
            self._num_left = self._connection.recv()
            if self._num_left == 0:
                trainer.should_stop = True
                self._num_left = 1
            if weft.memory.is_tracking() and batch_idx == NUM_WARM_UP:
                weft.memory.reset_peak()
            dist.barrier()
            self._start = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._num_left -= 1
        if self._num_left == 0 and not trainer.should_stop:
            self._connection.send(time.perf_counter() - self._start)


class _Batches(torch.utils.data.IterableDataset):
    """The same batch again and again."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def __iter__(self) -> Any:
        while True:
            yield self._batch


def _train(connection: Connection, name: str, options: dict[str, Any], num_rows: int, counts_memory: bool) -> None:
    """Train on this rank until a message is 0; then answer with the rank's peak bytes, or None."""
    warnings.simplefilter("ignore")
    for logger in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(num_ranks))
    build, make_batch = MODELS[name]
    monitor = MemoryMonitor()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=num_ranks,
        strategy=WeftModelParallelStrategy(plan="auto", **options),
        max_epochs=1,
        logger=False,
        callbacks=[_StepServer(connection), monitor] if counts_memory else [_StepServer(connection)],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        use_distributed_sampler=False,
    )
    trainer.fit(build(), DataLoader(_Batches(with_rows(make_batch(), num_rows)), batch_size=None))
    peak = max((row["total"] for row in monitor.table()), default=0) if counts_memory else None
    connection.send(peak)


def _start(name: str, layout: FoundLayout, num_ranks: int, *, counts_memory: bool) -> ProcessSet:
    return ProcessSet(_train, num_ranks, "cpu:weft", name, layout.strategy_options, layout.sequences, counts_memory)


def _name_of(layout: FoundLayout) -> str:
    stage = f" z{layout.zero_stage}" if layout.shards_data and layout.zero_stage != 3 else ""
    return f"{layout.layout}{stage}" + (f" m{layout.num_micro_batches}" if layout.pipeline_cuts else "")


def _measure(name: str, layout: FoundLayout, num_ranks: int) -> float:
    """Return the seconds of a step of a fresh set of processes: the median of the samples, of the slowest rank."""
    ranks = _start(name, layout, num_ranks, counts_memory=False)
    try:
        ranks.request(NUM_WARM_UP)
        seconds = max(ranks.request(1))
        num_steps = max(1, min(50, round(MIN_SECONDS / seconds)))
        return statistics.median(max(ranks.request(num_steps)) / num_steps for _ in range(SAMPLES))
    finally:
        ranks.close()


def _peak_bytes(name: str, layout: FoundLayout, num_ranks: int) -> int:
    ranks = _start(name, layout, num_ranks, counts_memory=True)
    try:
        ranks.request(NUM_WARM_UP)
        ranks.request(1)
        return max(ranks.request(0))
    finally:
        ranks.close()


def case_of(name: str, num_ranks: int, profile: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Return the predicted and measured times of all layouts of a model on `num_ranks` ranks."""
    build, make_batch = MODELS[name]
    found = tune_module(
        f"tune_models:{build.__name__}",
        num_ranks,
        batch=f"tune_models:{make_batch.__name__}",
        cluster=profile,
        memory="1TB",
        max_results=10_000,
        fixed="" if args.pipelines else "pp=1",
        zero_stage=args.zero_stages[0] if len(args.zero_stages) == 1 else None,
    )
    layouts = [each for each in found.layouts if not each.shards_data or each.zero_stage in args.zero_stages]
    seconds: dict[str, list[float]] = {_name_of(each): [] for each in layouts}
    for number in range(args.rounds):
        for layout in layouts if number % 2 == 0 else layouts[::-1]:
            seconds[_name_of(layout)].append(_measure(name, layout, num_ranks))
    counts_memory = layouts if args.memory_of == "all" else layouts[:1]
    rows = [
        {
            "layout": _name_of(each),
            "predicted_seconds": each.step_seconds,
            "measured_seconds": statistics.median(seconds[_name_of(each)]),
            "rounds": seconds[_name_of(each)],
            "predicted_bytes": each.peak_bytes,
            "measured_bytes": _peak_bytes(name, each, num_ranks) if each in counts_memory else None,
            "predicted_by_kind": each.seconds,
        }
        for each in layouts
    ]
    fastest = min(row["measured_seconds"] for row in rows)
    measured = [row["measured_seconds"] for row in rows]
    return {
        "model": name,
        "num_ranks": num_ranks,
        "rows_of_step": found.global_sequences,
        "chosen": rows[0]["layout"],
        "slower_than_fastest": rows[0]["measured_seconds"] / fastest,
        "slowest": max(measured) / fastest,
        "rank_correlation": _rank_correlation([row["predicted_seconds"] for row in rows], measured),
        "most_memory_above": max(
            row["measured_bytes"] / row["predicted_bytes"] - 1 for row in rows if row["measured_bytes"] is not None
        ),
        "layouts": rows,
    }


def network_of_environment() -> dict[str, Any]:
    """Return the values of a cluster's file for the network of WEFT_SLOW_NETWORK, if it is set."""
    network = SlowNetwork.of_environment()
    if network is None:
        return {}
    rates = {name: getattr(network, name) for name in ("seconds_per_message", "bytes_per_second")}
    return {"devices_per_host": network.ranks_per_host, "network_link": rates}


def _rank_correlation(first: list[float], second: list[float]) -> float:
    """Return Spearman's correlation of two lists without equal values."""

    def ranks(values: list[float]) -> list[float]:
        order = sorted(range(len(values)), key=values.__getitem__)
        return [float(order.index(idx)) for idx in range(len(values))]

    return statistics.correlation(ranks(first), ranks(second))


def failures(cases: list[dict[str, Any]]) -> list[str]:
    """Return the limits that are missed, one sentence each."""
    found = []
    slower = [case["slower_than_fastest"] for case in cases]
    share = sum(each <= SLOWER_MOSTLY for each in slower) / len(slower)
    if share < MOSTLY:
        found.append(f"{share:.0%} of the choices are at most {SLOWER_MOSTLY} of the fastest, wanted {MOSTLY:.0%}.")
    for case in cases:
        where = f"{case['model']} on {case['num_ranks']} ranks"
        if case["slower_than_fastest"] > SLOWER_NEVER:
            found.append(f"{where}: {case['chosen']} takes {case['slower_than_fastest']:.2f} of the fastest's time.")
        if case["most_memory_above"] > MEMORY_BOUND:
            found.append(f"{where}: a layout takes {case['most_memory_above']:.1%} more memory than predicted.")
    return found


def print_table(report: dict[str, Any]) -> None:
    machine = report["machine"]
    print(f"{machine['cpu']}, {machine['cpu_count']} cores, torch {machine['torch']}, {machine['date']}")
    for case in report["cases"]:
        print(
            f"\n{case['model']}, {case['num_ranks']} ranks: chosen {case['chosen']}, "
            f"{case['slower_than_fastest']:.2f} of the fastest, rank correlation {case['rank_correlation']:.2f}"
        )
        for row in case["layouts"]:
            print(
                f"  {row['layout']:<14} predicted {row['predicted_seconds'] * 1e3:>8.1f} ms  measured "
                f"{row['measured_seconds'] * 1e3:>8.1f} ms  {row['predicted_bytes'] / 1e6:>8.2f} MB  "
                + ("" if row["measured_bytes"] is None else f"{row['measured_bytes'] / 1e6:>8.2f} MB")
            )


def markdown(report: dict[str, Any]) -> str:
    """Return a table with a row for each case."""
    lines = [
        "| model | ranks | layouts | chosen | fastest | chosen / fastest | slowest / fastest | rank correlation |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case in report["cases"]:
        fastest = min(case["layouts"], key=lambda row: row["measured_seconds"])["layout"]
        cells = (
            case["model"],
            case["num_ranks"],
            len(case["layouts"]),
            case["chosen"],
            fastest,
            f"{case['slower_than_fastest']:.2f}",
            f"{case['slowest']:.2f}",
            f"{case['rank_correlation']:.2f}",
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def draw(report: dict[str, Any], path: Path) -> None:
    """Write a picture of the predicted against the measured time of each layout."""
    from pictures import new_pyplot, save_svg

    pyplot = new_pyplot()
    figure, axes = pyplot.subplots(figsize=(7, 5))
    for name in dict.fromkeys(case["model"] for case in report["cases"]):
        rows = [row for case in report["cases"] if case["model"] == name for row in case["layouts"]]
        axes.plot(
            [row["measured_seconds"] * 1e3 for row in rows],
            [row["predicted_seconds"] * 1e3 for row in rows],
            "o",
            label=name,
        )
    measured = [row["measured_seconds"] * 1e3 for case in report["cases"] for row in case["layouts"]]
    ends = [min(measured), max(measured)]
    axes.plot(ends, ends, "-", color="#8C8C8C", label="equal")
    axes.set(xscale="log", yscale="log", xlabel="measured step (ms)", ylabel="predicted step (ms)")
    axes.legend(frameon=False)
    save_svg(figure, path, "Predicted against measured step times of all layouts")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=3, help="fresh sets of processes of each layout")
    stages_help = "ZeRO stages of data-parallel ranks (default 3)"
    parser.add_argument("--zero-stages", type=int, nargs="+", default=[3], help=stages_help)
    parser.add_argument("--pipelines", action="store_true", help="compare layouts with pipelines, too")
    memory_help = "the layouts whose memory is counted, too: all (default), or the chosen one"
    parser.add_argument("--memory-of", choices=("all", "chosen"), default="all", help=memory_help)
    parser.add_argument("--keep", metavar="FILE", help="write the JSON object of the cases so far after each case")
    parser.add_argument("--network", default="", help="a slow network between hosts, as in the example above")
    parser.add_argument("--json", action="store_true", help="print one JSON object, not a table")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a limit is missed")
    parser.add_argument("--read", metavar="FILE", nargs="+", help="measure nothing, take the cases of files of --json")
    parser.add_argument("--markdown", action="store_true", help="print a table of the cases in Markdown")
    parser.add_argument("--draw", metavar="SVG", help="draw the cases")
    args = parser.parse_args()
    report = read(args.read) if args.read else measure(args)
    if args.json:
        print(json.dumps(report, indent=2))
    elif args.markdown:
        print(markdown(report))
    else:
        print_table(report)
    if args.draw:
        draw(report, Path(args.draw))
    found = failures(report["cases"])
    for sentence in found if args.check else []:
        print(sentence, file=sys.stderr)
    return 1 if args.check and found else 0


def read(paths: list[str]) -> dict[str, Any]:
    """Return the report of several runs on one machine."""
    reports = [json.loads(Path(path).read_text()) for path in paths]
    return {**reports[0], "cases": [case for report in reports for case in report["cases"]]}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    cases: list[dict[str, Any]] = []
    report = {"machine": machine_facts(), "network": args.network, "cases": cases}
    for num_ranks in args.ranks:
        os.environ["WEFT_SLOW_NETWORK"] = ""  # the profile is that of shared memory
        profile = profile_host(num_ranks).to_dict()
        os.environ["WEFT_SLOW_NETWORK"] = args.network
        for name in args.models:
            case = case_of(name, num_ranks, profile | network_of_environment(), args)
            cases.append(case)
            if args.keep:
                Path(args.keep).write_text(json.dumps(report, indent=2))
            print(
                f"{name}, {num_ranks} ranks: {case['chosen']}, {case['slower_than_fastest']:.2f} of the fastest, "
                f"slowest {case['slowest']:.2f}, rank correlation {case['rank_correlation']:.2f}",
                file=sys.stderr,
            )
    return report


if __name__ == "__main__":
    sys.exit(main())
