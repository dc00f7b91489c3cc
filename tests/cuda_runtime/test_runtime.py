"""The CUDA runtime without a device finds what it exists to find: each test makes a mistake on purpose."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from support import cuda_runtime
from support.processes import run_process
from support.ranks import on_ranks

pytestmark = pytest.mark.cuda_runtime
SIZE = 1 << 10
PATIENT_MS = 20_000


@pytest.fixture(autouse=True)
def patient_streams() -> Iterator[None]:
    """Start with idle streams, whose work begins only if the host or another stream needs it."""
    if not cuda_runtime.is_active():
        yield
        return
    torch.cuda.synchronize()
    with cuda_runtime.delay(PATIENT_MS):
        yield


def test_values_of_another_stream_need_a_wait() -> None:
    side = torch.cuda.Stream()
    x = torch.zeros(SIZE, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.add_(1)
    assert x.sum().item() == 0  # the side stream has not run
    torch.cuda.current_stream().wait_stream(side)
    assert x.sum().item() == SIZE


def test_memory_that_another_stream_uses_needs_record_stream() -> None:
    side = torch.cuda.Stream()

    def sum_on_side(*, is_recorded: bool) -> float:
        torch.cuda.synchronize()
        x = torch.ones(SIZE, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            total = x.sum()
        if is_recorded:
            x.record_stream(side)
        del x
        next_owner = torch.full((SIZE,), 5.0, device="cuda")
        assert next_owner.sum().item() == 5 * SIZE
        side.synchronize()
        return total.item()

    assert sum_on_side(is_recorded=False) == 5 * SIZE
    assert sum_on_side(is_recorded=True) == SIZE


def test_copies_to_pinned_memory_need_a_wait() -> None:
    x = torch.ones(SIZE, device="cuda")
    pinned = torch.zeros(SIZE, pin_memory=True)
    pinned.copy_(x, non_blocking=True)
    assert pinned.sum() == 0
    torch.cuda.synchronize()
    assert pinned.sum() == SIZE


def test_pageable_memory_is_read_before_a_copy_returns() -> None:
    pageable = torch.ones(SIZE)
    x = pageable.to("cuda", non_blocking=True)
    pageable.zero_()
    assert x.sum().item() == SIZE


def test_pinned_memory_is_read_when_the_copy_runs() -> None:
    pinned = torch.ones(SIZE).pin_memory()
    x = pinned.to("cuda", non_blocking=True)
    pinned.zero_()
    assert x.sum().item() == 0


def test_new_memory_is_not_zero() -> None:
    assert torch.empty(1 << 24, device="cuda").isnan().any().item()


def test_kernel_without_version_for_the_host_raises() -> None:
    with pytest.raises(RuntimeError, match="without a version for the host"):
        torch.ops.aten._thnn_fused_gru_cell(*(torch.ones(2, n, device="cuda") for n in (12, 12, 4)))


def test_synchronizations_are_counted() -> None:
    x = torch.ones(SIZE, device="cuda")
    before = cuda_runtime.count("synchronizations")
    y = x * 2
    assert cuda_runtime.count("synchronizations") == before
    y.sum().item()
    assert cuda_runtime.count("synchronizations") > before


def test_random_numbers_follow_the_generator_of_the_device() -> None:
    torch.cuda.manual_seed(7)
    state = torch.cuda.get_rng_state()
    first, second = torch.rand(SIZE, device="cuda"), torch.rand(SIZE, device="cuda")
    assert not torch.equal(first, second)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(SIZE, device="cuda"), first)


def test_graph_runs_its_work_again() -> None:
    x = torch.zeros(SIZE, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
    torch.cuda.synchronize()
    assert x.sum().item() == 0  # a capture runs nothing
    graph.replay()
    graph.replay()
    assert x.sum().item() == 2 * SIZE


def test_waiting_in_a_capture_raises() -> None:
    x = torch.ones(SIZE, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match=r"in a capture|is captured"), torch.cuda.graph(graph):
        x.sum().item()


def test_devices_have_memory_of_their_own() -> None:
    before = [torch.cuda.memory_allocated(i) for i in range(2)]
    x = torch.ones(SIZE, device="cuda:1")
    assert [torch.cuda.memory_allocated(i) - before[i] for i in range(2)] == [0, 4 * SIZE]
    assert x.to("cuda:0").sum().item() == SIZE


def test_process_forked_after_cuda_was_used_cannot_use_it() -> None:
    torch.ones(1, device="cuda")
    pid = os.fork()
    if pid == 0:
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@on_ranks(2)
def test_nccl_collectives_and_messages(rank: int, world_size: int) -> None:
    torch.cuda.set_device(rank)
    group = dist.new_group(backend="nccl")
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64):
        x = torch.full((5,), rank + 1, device="cuda", dtype=dtype)
        dist.all_reduce(x, group=group)
        assert x.tolist() == [3] * 5
    gathered = torch.empty(4, device="cuda")
    dist.all_gather_into_tensor(gathered, torch.full((2,), float(rank), device="cuda"), group=group)
    assert gathered.tolist() == [0, 0, 1, 1]
    scattered = torch.empty(2, device="cuda")
    dist.reduce_scatter_tensor(scattered, torch.arange(4.0, device="cuda"), group=group)
    assert scattered.tolist() == [4.0 * rank, 4.0 * rank + 2]
    dist.broadcast(x, 1, group=group)
    exchanged = torch.empty(3, device="cuda")
    ops = [
        dist.P2POp(dist.isend, torch.full((3,), float(rank), device="cuda"), 1 - rank, group),
        dist.P2POp(dist.irecv, exchanged, 1 - rank, group),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert exchanged.tolist() == [1.0 - rank] * 3
    # A stream that has not waited for a call does not see its result.
    with cuda_runtime.delay(PATIENT_MS):
        total = torch.ones(SIZE, device="cuda")
        work = dist.all_reduce(total, group=group, async_op=True)
        early = total * 1
        work.wait()
        assert (early[0].item(), (total * 1)[0].item()) == (1, 2)
    dist.destroy_process_group(group)


# Each rank is a new process, because these errors last until the process ends.
TWO_RANKS = """
import os, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
import weft

def run(rank, folder, mistake):
    torch.cuda.set_device(rank)
    store = dist.FileStore(folder + "/store", 2)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=3))
    x = torch.ones(4, device="cuda")
    dist.all_reduce(x)
    if mistake == "calls differ":
        dist.all_reduce(x) if rank == 0 else dist.broadcast(x, 0)
    elif rank == 0:
        dist.send(x, 1)  # rank 1 never receives it
    print("sum", x.sum().item(), flush=True)
    time.sleep(30)

if __name__ == "__main__":
    torch.multiprocessing.spawn(run, sys.argv[1:], nprocs=2)
"""


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("calls differ", r"rank \d calls (all_reduce|broadcast from 0), 16 bytes, and rank \d calls"),
        ("no receive", "Operation timed out after"),
    ],
    ids=["calls differ", "no receive"],
)
def test_nccl_mistake_ends_the_process(tmp_path: Path, mistake: str, message: str) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(TWO_RANKS)
    environment = {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "100"}  # otherwise processes wait for a dump
    result = run_process([sys.executable, script, tmp_path, mistake], env=environment, timeout=60)
    assert result.returncode != 0
    assert re.search(message, result.stderr + result.stdout), result.stderr[-3000:]


@on_ranks(2)
def test_both_streams_of_a_group_of_calls_have_its_results(rank: int, world_size: int) -> None:
    torch.cuda.set_device(rank)
    group = dist.new_group(backend="nccl")
    side = torch.cuda.Stream()
    with cuda_runtime.delay(PATIENT_MS):
        x, y = torch.ones(SIZE, device="cuda"), torch.ones(SIZE, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with dist._coalescing_manager(group=group, device=torch.device("cuda", rank), async_ops=True) as works:
            dist.all_reduce(x, group=group)
            dist.all_reduce(y, group=group)
        with torch.cuda.stream(side):
            works.wait()
            assert (x + y)[0].item() == 4
    dist.destroy_process_group(group)


def test_without_delay_streams_advance_by_themselves() -> None:
    with cuda_runtime.delay(0):
        x = torch.zeros(SIZE, device="cuda").add_(1)
        done = torch.cuda.Event()
        done.record()
        deadline = time.monotonic() + 10
        while not done.query():
            assert time.monotonic() < deadline
            time.sleep(0.001)
    assert x.sum().item() == SIZE


def test_event_of_an_ended_capture_raises() -> None:
    x, event = torch.zeros(SIZE, device="cuda"), torch.cuda.Event()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
        event.record()
    with pytest.raises(RuntimeError, match="a capture that has ended"):
        torch.cuda.current_stream().wait_event(event)


@on_ranks(2)
def test_nccl_ranks_need_a_device_each() -> None:
    torch.cuda.set_device(0)
    with pytest.raises(RuntimeError, match="two ranks of a communicator use one device"):
        dist.new_group(backend="nccl", device_id=torch.device("cuda:0"))
    assert torch.ones(SIZE, device="cuda").sum().item() == SIZE  # an error of NCCL does not fail CUDA's next call
