"""Seconds to save and to load a checkpoint directory: weft's against torch.distributed.checkpoint's.

    python benchmarks/checkpoint.py [--ranks 2 4] [--megabytes 512] [--sets 3] [--samples 3] [--folder DIR] [--json]
                                    [--check]

Each rank holds --megabytes of float32 weights of [4096, 4096], half of them sharded by rows and half by columns. Both
sides synchronise their files with the disk, and load into weights that exist; weft also compares checksums. The files
are read from the page cache. A sample is the time of the slowest rank, and the ways are taken in turn. Each set has
fresh processes for the saves, and others for the loads of the last sample's files, as a training that goes on has.
"copy" is a copy of the rank's weights to other memory. "start" is the time that training stands still for a save in the
background, and "async" the time until it is on the disk; the ranks do nothing else meanwhile. The strategies of
Lightning save by torch.distributed.checkpoint.save, which is "torch save".

--check fails if weft saves more slowly than torch, does not load 1.5 times as fast, or stands still for more than 1.2
times the copy, by the median of paired ratios.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import machine_facts, median_paired_ratio, run_on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

SIZE = 4096
WAYS = (
    *("copy", "weft save", "torch save", "weft start", "torch start", "weft async", "torch async"),
    *("weft load", "weft load, unchecked", "torch load"),
)
MAX_START = 1.2  # of the copy's time
MAX_SAVE = 1.0  # of torch's time
MAX_LOAD = 1 / 1.5


def _weights(megabytes: int) -> dict[str, DTensor]:
    num_ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("tensor_parallel",))
    weights = {}
    for idx in range(max(megabytes * 2**20 * num_ranks // (SIZE * SIZE * 4), 2)):
        shape = [SIZE, SIZE]
        shape[idx % 2] //= num_ranks
        weights[f"layer.{idx}.weight"] = DTensor.from_local(torch.randn(shape), mesh, [Shard(idx % 2)])
    return weights


def _timed(seconds: dict[str, list[float]], way: str, call: Callable[[], Any]) -> None:
    """Append the time of the slowest rank; collective."""
    dist.barrier()
    begin = time.perf_counter()
    call()
    own = torch.tensor(time.perf_counter() - begin)
    dist.all_reduce(own, dist.ReduceOp.MAX)
    seconds[way].append(own.item())


def _like(weights: dict[str, DTensor]) -> dict[str, DTensor]:
    return {
        name: DTensor.from_local(torch.zeros_like(w.to_local()), w.device_mesh, w.placements)
        for name, w in weights.items()
    }


def measure_loads(megabytes: int, samples: int, folder: Path) -> dict[str, list[float]]:
    """Return the seconds of each way to load `folder`'s checkpoints "weft" and "torch", by sample; collective."""
    from weft.strategy.checkpoint import open_checkpoint

    target, ours, torchs = _like(_weights(megabytes)), folder / "weft", folder / "torch"
    seconds: dict[str, list[float]] = {way: [] for way in WAYS if "load" in way}
    for sample in range(-1, samples):  # sample -1 is not counted: it maps memory
        loads = [
            ("weft load", lambda: open_checkpoint(ours).load({"model": target})),
            ("weft load, unchecked", lambda: open_checkpoint(ours, verify=False).load({"model": target})),
            ("torch load", lambda: dcp.load({"model": target}, checkpoint_id=torchs)),
        ]
        for way, call in loads if sample % 2 else reversed(loads):
            _timed(seconds, way, call)
    return {way: values[1:] for way, values in seconds.items()}


def measure(megabytes: int, samples: int, folder: Path) -> dict[str, Any]:
    """Return the seconds of each way to save, by sample, and the bytes of a rank's weights; collective.

    Leaves the checkpoints of the last sample in `folder`, as "weft" and "torch".
    """
    from weft.strategy import durable
    from weft.strategy.checkpoint import background, save

    weights = _weights(megabytes)
    target = _like(weights)
    group = dist.new_group()  # torch's thread starts collectives
    seconds: dict[str, list[float]] = {way: [] for way in WAYS if "load" not in way}
    timed = partial(_timed, seconds)

    def start_weft(path: Path) -> None:
        background.start(path, durable.temporary_name(path), {"model": weights}, {}, {}, 600.0)

    def start_torch(path: Path, started: list[Any]) -> None:
        started.append(dcp.async_save({"model": weights}, checkpoint_id=path, process_group=group))

    def copy() -> None:
        for name, weight in weights.items():
            target[name].to_local().copy_(weight.to_local())

    for sample in range(-1, samples):  # sample -1 is not counted: it maps memory
        ours, torchs = folder / f"weft-{sample}", folder / f"torch-{sample}"
        if dist.get_rank() == 0:
            ours.mkdir()
        timed("copy", copy)
        saves = [
            ("weft save", lambda ours=ours: save(ours, {"model": weights}, {}, {})),
            ("torch save", lambda torchs=torchs: dcp.save({"model": weights}, checkpoint_id=torchs)),
        ]
        for way, call in saves if sample % 2 else reversed(saves):
            timed(way, call)
        for way in ("weft", "torch") if sample % 2 else ("torch", "weft"):
            path, started = folder / f"{way}-async-{sample}", []
            if dist.get_rank() == 0 and way == "weft":
                durable.temporary_name(path).mkdir()
            timed(f"{way} start", partial(start_weft, path) if way == "weft" else partial(start_torch, path, started))
            timed(f"{way} async", background.wait if way == "weft" else started[0].result)
            seconds[f"{way} async"][-1] += seconds[f"{way} start"][-1]
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(path)
        dist.barrier()
        if dist.get_rank() == 0:
            for path, name in ((ours, "weft"), (torchs, "torch")):
                path.rename(folder / name) if sample == samples - 1 else shutil.rmtree(path)
    num_bytes = sum(weight.to_local().nbytes for weight in weights.values())
    return {"seconds": {way: values[1:] for way, values in seconds.items()}, "bytes": num_bytes}


def _row(num_ranks: int, sets: list[dict[str, Any]]) -> dict[str, Any]:
    seconds = {way: [value for each in sets for value in each["seconds"][way]] for way in WAYS}
    return {
        "ranks": num_ranks,
        "bytes": sets[0]["bytes"],
        "median": {way: statistics.median(values) for way, values in seconds.items()},
        "p99": {
            way: max(values) if len(values) < 100 else statistics.quantiles(values, n=100)[98]
            for way, values in seconds.items()
        },
        "save_ratio": median_paired_ratio(seconds["weft save"], seconds["torch save"]),
        "start_ratio": median_paired_ratio(seconds["weft start"], seconds["copy"]),
        "async_ratio": median_paired_ratio(seconds["weft async"], seconds["torch async"]),
        "load_ratio": median_paired_ratio(seconds["weft load"], seconds["torch load"]),
        "num_samples": len(seconds["copy"]),
    }


def _print(row: dict[str, Any]) -> None:
    print(f"{row['ranks']} ranks, {row['bytes'] / 1e6:.0f} MB each, {row['num_samples']} samples")
    for way in WAYS:
        median = row["median"][way]
        rate = row["bytes"] / median / 1e9
        print(f"  {way:<22} {median:8.3f} s   p99 {row['p99'][way]:8.3f} s   {rate:6.2f} GB/s a rank")
    print(f"  weft / torch: save {row['save_ratio']:.2f}, async {row['async_ratio']:.2f}, load {row['load_ratio']:.2f}")
    print(f"  weft start / copy: {row['start_ratio']:.2f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--megabytes", type=int, default=512, help="of weights on each rank (default 512)")
    parser.add_argument("--sets", type=int, default=3, help="sets of fresh processes (default 3)")
    parser.add_argument("--samples", type=int, default=3, help="of each set (default 3)")
    parser.add_argument("--folder", help="where the checkpoints are written; default: a temporary folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a limit is missed")
    args = parser.parse_args()
    rows = []
    for num_ranks in args.ranks:
        sets = []
        for _ in range(args.sets):
            with tempfile.TemporaryDirectory(dir=args.folder) as folder:
                of_set = (num_ranks, args.megabytes, args.samples, Path(folder))
                sets.append(run_on_ranks(measure, *of_set))
                sets[-1]["seconds"] |= run_on_ranks(measure_loads, *of_set)
        rows.append(_row(num_ranks, sets))
    if args.json:
        print(json.dumps({"benchmark": "checkpoint", "machine": machine_facts(), "results": rows}, indent=2))
    else:
        for row in rows:
            _print(row)
    limits = {"save_ratio": MAX_SAVE, "load_ratio": MAX_LOAD, "start_ratio": MAX_START}
    misses = [row for row in rows if any(row[name] > limit for name, limit in limits.items())]
    return 1 if args.check and misses else 0


if __name__ == "__main__":
    sys.exit(main())
