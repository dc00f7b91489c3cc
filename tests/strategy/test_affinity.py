"""spread_ranks: each rank of a host gets its share of the processors."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from support.ranks import on_ranks
from weft.strategy import affinity, spread_ranks
from weft.strategy.affinity import run_on, share_of


@pytest.mark.parametrize(
    ("processors", "number", "expected"),
    [
        ([0, 1, 2, 3], 2, [{0, 1}, {2, 3}]),
        ([0, 4, 1, 5, 2], 2, [{0, 4}, {1, 5, 2}]),
        ([7], 1, [{7}]),
        ([2, 3], 3, [{2}, {3}, {2}]),
        (list(range(8)), 3, [{0, 1}, {2, 3, 4}, {5, 6, 7}]),
    ],
)
def test_shares(processors: list[int], number: int, expected: list[set[int]]) -> None:
    assert [share_of(processors, idx, number) for idx in range(number)] == expected


def test_order_follows_nodes_and_cores(tmp_path: Path) -> None:
    """Processors 0 and 4, 1 and 5, ... are threads of one core; the cores 2 and 3 are in NUMA node 0."""
    for processor in range(8):
        folder = tmp_path / f"cpu{processor}"
        (folder / "topology").mkdir(parents=True)
        core = processor % 4
        (folder / f"node{int(core < 2)}").mkdir()
        (folder / "topology/core_id").write_text(f"{core % 2}\n")
        (folder / "topology/physical_package_id").write_text(f"{int(core < 2)}\n")
    order = sorted(range(8), key=lambda processor: affinity._place_of(processor, tmp_path))
    assert order == [2, 6, 3, 7, 0, 4, 1, 5]
    assert sorted([3, 1, 2], key=lambda processor: affinity._place_of(processor, tmp_path / "none")) == [1, 2, 3]


def _processors_of_ranks(processors: Any) -> list[frozenset[int]]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, frozenset(processors))
    return gathered


@on_ranks(2, 3)
def test_ranks_get_their_shares(rank: int, world_size: int) -> None:
    before = frozenset(os.sched_getaffinity(0))
    ends, thread_ids = threading.Event(), []
    ready = threading.Event()

    def wait() -> None:
        thread_ids.append(threading.get_native_id())
        ready.set()
        ends.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    ready.wait()
    try:
        assert spread_ranks() == before
        own = frozenset(os.sched_getaffinity(0))
        assert own == frozenset(os.sched_getaffinity(thread_ids[0]))
        shares = _processors_of_ranks(own)
        assert frozenset().union(*shares) == before
        if len(before) >= world_size:
            assert sum(map(len, shares)) == len(before)
        elif len(before) > 1:
            assert [len(share) for share in shares] == [1] * world_size
        if len(before) > 1:
            assert spread_ranks() is None  # the ranks use different processors
        assert frozenset(os.sched_getaffinity(0)) == own
    finally:
        run_on(before)
        ends.set()
        thread.join()
    assert _processors_of_ranks(os.sched_getaffinity(0)) == [before] * world_size


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
@on_ranks(2)
def test_processors_that_the_user_has_chosen_stay(rank: int, world_size: int) -> None:
    before = frozenset(os.sched_getaffinity(0))
    if rank == 0:
        run_on({min(before)})
    own = frozenset(os.sched_getaffinity(0))
    assert spread_ranks() is None
    assert frozenset(os.sched_getaffinity(0)) == own
    run_on(before)


@on_ranks(1)
def test_one_rank_stays(rank: int, world_size: int) -> None:
    before = os.sched_getaffinity(0)
    assert spread_ranks() is None and os.sched_getaffinity(0) == before


def test_a_process_without_a_group_raises() -> None:
    with pytest.raises(RuntimeError, match=r"no default process group; call torch\.distributed\.init_process_group"):
        spread_ranks()
