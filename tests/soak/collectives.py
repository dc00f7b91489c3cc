"""Runs random collectives on random sub-groups with random delays, checks all values and looks for leaks.

    python tests/soak/collectives.py --seconds 600 --hosts aaaaaaaa

Fails at the first wrong value or failed call. Otherwise prints one JSON line, and exits with 0 if neither file
descriptors, memory nor /dev/shm have grown.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import random
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import weft  # noqa: F401  (registers the backend)

GROUPS, STEPS_PER_ROUND = 6, 400
SIZES = (0, 1, 7, 300, 5_000, 70_000, 900_000)
CALLS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "barrier", "ring")
CALLS += ("gather", "scatter")
MAX_GROWTH_MIB = 16.0  # of a rank's private memory after the third round


def value(member: int, step: int) -> float:
    return float((member * 7 + step) % 64)


def full(size: int, number: float) -> torch.Tensor:
    return torch.full((size,), number)


def run_step(call: str, size: int, step: int, group: dist.ProcessGroup, members: list[int], is_async: bool) -> None:
    """Make one call on this rank, which is one of `members`, and check its results."""
    group_rank = members.index(dist.get_rank())
    tensor = full(size, value(group_rank, step))
    values = [value(each, step) for each in range(len(members))]
    root = step % len(members)
    outputs = [full(size, -1.0) for _ in members]
    expected: list[torch.Tensor] = []
    work = None
    if call == "all_reduce":
        work = dist.all_reduce(tensor, group=group, async_op=is_async)
        outputs, expected = [tensor], [full(size, sum(values))]
    elif call == "all_gather":
        work = dist.all_gather(outputs, tensor, group=group, async_op=is_async)
        expected = [full(size, each) for each in values]
    elif call == "reduce_scatter":
        inputs = [full(size, value(group_rank, step + each)) for each in range(len(members))]
        work = dist.reduce_scatter(outputs[0], inputs, group=group, async_op=is_async)
        outputs, expected = (
            outputs[:1],
            [full(size, sum(value(each, step + group_rank) for each in range(len(members))))],
        )
    elif call == "broadcast":
        work = dist.broadcast(tensor, members[root], group=group, async_op=is_async)
        outputs, expected = [tensor], [full(size, values[root])]
    elif call == "all_to_all":
        inputs = [full(size, value(group_rank, step + each)) for each in range(len(members))]
        work = dist.all_to_all(outputs, inputs, group=group, async_op=is_async)
        expected = [full(size, value(each, step + group_rank)) for each in range(len(members))]
    elif call == "gather":
        is_root = group_rank == root
        work = dist.gather(tensor, outputs if is_root else None, dst=members[root], group=group, async_op=is_async)
        outputs = outputs if is_root else []
        expected = [full(size, each) for each in values] if is_root else []
    elif call == "scatter":
        inputs = [full(size, value(root, step + each)) for each in range(len(members))] if group_rank == root else None
        work = dist.scatter(outputs[0], inputs, src=members[root], group=group, async_op=is_async)
        outputs, expected = outputs[:1], [full(size, value(root, step + group_rank))]
    elif call == "ring" and len(members) > 1:
        after, before = (group_rank + 1) % len(members), (group_rank - 1) % len(members)
        works = [dist.isend(tensor, members[after], group=group), dist.irecv(outputs[0], members[before], group=group)]
        for each in works if step % 2 else works[::-1]:
            each.wait()
        outputs, expected = outputs[:1], [full(size, values[before])]
    elif call == "barrier":
        dist.barrier(group=group)
        outputs = []
    else:
        outputs = []
    if work is not None:
        work.wait()
    for output, wanted in zip(outputs, expected, strict=True):
        if not torch.equal(output, wanted):
            raise AssertionError(f"{call} of {size} at step {step} on {members}: {output[:4]}, wanted {wanted[:4]}")


def resources() -> dict[str, float]:
    """Return this process's file descriptors, weft mappings and private MiB, after freeing the allocator's caches."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "mappings": Path("/proc/self/maps").read_text().count("memfd:weft"),
        "own_mib": int(status["RssAnon"].split()[0]) / 1024,
    }


def run_rank(rank: int, hosts: str, folder: str, seconds: float, seed: int) -> None:
    torch.set_num_threads(1)
    num_ranks = len(hosts)
    os.environ["WEFT_HOST_ID"] = hosts[rank]
    store = dist.FileStore(f"{folder}/store", num_ranks)
    dist.init_process_group("cpu:weft", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=120))
    same, delays = random.Random(seed), random.Random(seed + 1 + rank)  # `same` on all ranks
    deadline = time.monotonic() + seconds
    first: dict[str, float] = {}
    num_steps = num_rounds = 0
    while True:
        is_over = torch.tensor([float(time.monotonic() > deadline)])
        dist.broadcast(is_over, 0)
        if is_over.item():
            break
        ranks_of = [sorted(same.sample(range(num_ranks), same.randint(1, num_ranks))) for _ in range(GROUPS)]
        groups = [dist.new_group(ranks, backend="cpu:weft") for ranks in ranks_of]
        for step in range(STEPS_PER_ROUND):
            group_idx, call, size = same.randrange(GROUPS), same.choice(CALLS), same.choice(SIZES)
            is_async = same.random() < 0.3
            if rank not in ranks_of[group_idx]:
                continue
            if delays.random() < 0.05:
                time.sleep(delays.expovariate(1 / 0.002))
            run_step(call, size, step, groups[group_idx], ranks_of[group_idx], is_async)
            num_steps += 1
        for ranks, group in zip(ranks_of, groups, strict=True):
            if rank in ranks:
                dist.barrier(group=group)
                dist.destroy_process_group(group)
        del groups, group  # otherwise resources() would count those of the groups
        num_rounds += 1
        if num_rounds == 3:
            first = resources()
    last = resources()
    dist.barrier()
    Path(folder, f"resources-{rank}").write_text(
        json.dumps({"steps": num_steps, "rounds": num_rounds, "first": first or last, "last": last})
    )
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument(
        "--hosts", default="aaaaaaaa", help="a letter for each rank; ranks with the same letter share a host"
    )
    parser.add_argument("--seed", type=int, default=20261121)
    args = parser.parse_args()
    before = set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory(prefix="weft-soak-") as folder:
        mp.start_processes(
            run_rank, (args.hosts, folder, args.seconds, args.seed), nprocs=len(args.hosts), start_method="fork"
        )
        ranks = [json.loads(Path(folder, f"resources-{rank}").read_text()) for rank in range(len(args.hosts))]
    growth = [rank["last"]["own_mib"] - rank["first"]["own_mib"] for rank in ranks]
    leaked = [rank["last"][what] - rank["first"][what] for rank in ranks for what in ("descriptors", "mappings")]
    left = sorted(set(os.listdir("/dev/shm")) - before)
    report = {
        "soak": "collectives",
        "hosts": args.hosts,
        "seconds": args.seconds,
        "rounds": ranks[0]["rounds"],
        "calls": sum(rank["steps"] for rank in ranks),
        "most_memory_growth_mib": round(max(growth), 2),
        "most_descriptors_or_mappings_leaked": max(leaked),
        "left_in_dev_shm": left,
    }
    print(json.dumps(report))
    return int(max(growth) > MAX_GROWTH_MIB or max(leaked) > 0 or bool(left))


if __name__ == "__main__":
    sys.exit(main())
