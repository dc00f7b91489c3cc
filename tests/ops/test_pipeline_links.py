"""Messages over device links; on the CPU, the links use gloo instead of NCCL."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import weft
from ops.test_pipeline import _like, check_stages
from support.ranks import on_ranks
from weft import pipeline_links
from weft.collectives import BackendOptions, CollectiveMismatchError

OPS = weft.ops
GLOO = BackendOptions().transport
BACKENDS = ["cpu:weft", "gloo"]  # of the group that carries the announcements


@contextmanager
def _linked(backend: str = "cpu:weft", device: str = "cpu", seconds: float = 20) -> Iterator[str]:
    """Yield the name of a group of all ranks in which each pair has a link."""
    group = dist.new_group(backend=backend, timeout=timedelta(seconds=seconds))
    peers = [rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()]
    pipeline_links.link(group, peers, torch.device(device), transport=GLOO)
    try:
        yield group.group_name
    finally:
        pipeline_links.unlink(group)


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("backend", BACKENDS)
def test_stages_match_full_model(rank: int, world_size: int, backend: str) -> None:
    # No tensor is on "cpu:0": messages are announced for the link, but sent as cuda_group a link.
    for device in ("cpu", "cpu:0"):
        with _linked(backend, device) as group:
            for order in ("all forward, all backward", "one forward, one backward"):
                check_stages(rank, world_size, order, group)


@on_ranks(2)
@pytest.mark.parametrize("backend", BACKENDS)
def test_messages_of_all_dtypes_arrive_in_any_order(rank: int, backend: str) -> None:
    """Messages are awaited in another order than they are sent; repeated layouts are not announced again."""
    dtypes = [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]
    with _linked(backend) as group:
        for shape in [(3, 5), (), (0, 4), (700, 700), (3, 5), (2, 1, 2, 1, 2, 1, 2, 1, 2, 2)]:
            torch.manual_seed(2)
            tensors = [torch.randn(shape).mul(3).to(dtype) for dtype in dtypes]
            if rank == 0:
                tokens = [OPS.pipeline_send([x.T if x.dim() == 2 else x], 1, 5, group) for x in tensors]
                tokens.append(OPS.pipeline_send([x.conj() for x in tensors], 1, 1022, group))
                assert [OPS.pipeline_wait(token) for token in tokens] == [[]] * 8
                continue
            like = [torch.empty((), dtype=x.dtype).expand(x.shape) for x in tensors]
            singles = [OPS.pipeline_recv([x.T if x.dim() == 2 else x], 0, 5, group) for x in like]
            together = OPS.pipeline_wait(OPS.pipeline_recv(like, 0, 1022, group))
            separate = [OPS.pipeline_wait(token)[0] for token in reversed(singles)][::-1]
            for sent, one, other in zip(tensors, together, separate, strict=True):
                assert torch.equal(sent.conj(), one) and one.dtype == sent.dtype
                assert torch.equal(sent.T if sent.dim() == 2 else sent, other)
        OPS.pipeline_flush(group)


@on_ranks(3)
def test_large_sends_before_receives_do_not_hang(rank: int, world_size: int) -> None:
    """Every rank sends large messages around a ring in both directions before it receives."""
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    with _linked() as group:
        for _ in range(3):
            x = torch.full((1 << 20,), float(rank))
            for channel, peer in enumerate((after, before)):
                OPS.pipeline_send([x], peer, channel, group)
            for channel, peer in enumerate((before, after)):
                [got] = OPS.pipeline_wait(OPS.pipeline_recv([x], peer, channel, group))
                assert torch.equal(got, torch.full_like(got, float(peer)))
            OPS.pipeline_flush(group)


@on_ranks(2)
def test_threads_wait_for_one_link(rank: int) -> None:
    """A message that a thread reads while it waits for a later message is available to other threads at once."""
    with _linked() as group:
        x = torch.arange(4.0)
        if rank == 0:
            OPS.pipeline_send([x], 1, 1, group)
            OPS.pipeline_wait(OPS.pipeline_recv([x], 1, 2, group))  # which rank 1 sends after it receives channel 1
            OPS.pipeline_send([2 * x], 1, 0, group)
        else:
            later: list[Tensor] = []
            token = OPS.pipeline_recv([x], 0, 0, group)
            reader = threading.Thread(target=lambda: later.extend(OPS.pipeline_wait(token)))
            reader.start()
            [first] = OPS.pipeline_wait(OPS.pipeline_recv([x], 0, 1, group))
            OPS.pipeline_send([first], 0, 2, group)
            reader.join(20)
            assert torch.equal(first, x) and torch.equal(later[0], 2 * x)
        OPS.pipeline_flush(group)


@on_ranks(2)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("like", "text"),
    [
        ([_like(4, 3)], r"1 tensor, Double \[4, 3\] that needs a gradient"),
        ([_like(3, 4), _like(2)], r"2 tensors, the first Double \[3, 4\] that needs a gradient"),
    ],
)
def test_mismatches_raise_on_both_sides(rank: int, backend: str, like: list[Tensor], text: str) -> None:
    """The receiver receives an announced tensor even if it raises, so that no rank hangs on the device."""
    with _linked(backend) as group:
        if rank == 0:
            x = torch.ones(3, 4, dtype=torch.float64, requires_grad=True)
            with pytest.raises(CollectiveMismatchError):
                OPS.join(torch.zeros(()), [OPS.pipeline_send([x], 1, 7, group)]).backward()
            assert x.grad is None
        else:
            token = OPS.pipeline_recv(like, 0, 7, group)
            with pytest.raises(CollectiveMismatchError, match=text) as raised:
                OPS.pipeline_wait(token)
            assert "message 0 on channel 7 from rank 0 to rank 1" in str(raised.value)
            assert "rank 0 sent 1 tensor, Double [3, 4] that needs a gradient" in str(raised.value)


@on_ranks(2)
def test_missing_message_times_out(rank: int) -> None:
    with _linked(seconds=1) as group:
        if rank == 1:
            token = OPS.pipeline_recv([torch.ones(3)], 0, 0, group)
            with pytest.raises(Exception, match="weft::pipeline_wait: the message 0 on channel 0 from rank 0"):
                OPS.pipeline_wait(token)
        dist.barrier()


@on_ranks(2)
def test_group_carries_announcements_and_link_tensors(rank: int) -> None:
    """The group carries the announcement, with a layout the first time; the link carries each tensor."""
    x = torch.ones(3, 4)
    with _linked() as group:

        def exchange() -> None:
            token = OPS.pipeline_recv([x, x], 0, 0, group) if rank else OPS.pipeline_send([x, x], 1, 0, group)
            OPS.pipeline_wait(token)

        name = "recv" if rank else "send"
        for announced in (2, 1):
            with profile(activities=[ProfilerActivity.CPU]) as profiler:
                exchange()
            events = Counter(event.name for event in profiler.events() if ":" in event.name)
            assert events[f"weft:{name}"] == announced, events
            assert events[f"gloo:{name}"] == 2, events
            dist.barrier()


@on_ranks(2)
def test_group_can_be_linked_again(rank: int) -> None:
    group, x = dist.new_group(backend="cpu:weft"), torch.ones(2)
    for _ in range(2):
        for _ in range(2):  # in the second call all peers already have a link
            pipeline_links.link(group, [1 - rank], torch.device("cpu"), transport=GLOO)
        token = OPS.pipeline_recv([x], 1 - rank, 0, group.group_name)
        OPS.pipeline_send([x + rank], 1 - rank, 0, group.group_name)
        assert torch.equal(OPS.pipeline_wait(token)[0], x + 1 - rank)
        OPS.pipeline_flush(group.group_name)
        pipeline_links.unlink(group)


@on_ranks(2)
def test_invalid_links_raise(rank: int) -> None:
    world = dist.group.WORLD
    for peer in (rank, 2, -1):
        with pytest.raises(ValueError, match=f"got peer {peer} on rank {rank} of 2; pass another rank of the group"):
            pipeline_links.link(world, [peer], torch.device("cpu"), transport=GLOO)
    with pytest.raises(ValueError, match="link got the device cuda without an index; pass an index, as in 'cuda:0'"):
        pipeline_links.link(world, [1 - rank], torch.device("cuda"))
    with pytest.raises(ValueError, match="link got the device cpu without a transport; pass transport=, or a CUDA"):
        pipeline_links.link(world, [1 - rank], torch.device("cpu"))
    group = dist.new_group(backend="cpu:weft")
    pipeline_links.link(group, [1 - rank], torch.device("cpu"), transport=GLOO)
    with pytest.raises(ValueError, match=rf"rank {rank} is linked to rank {1 - rank} for cpu and got cuda:0; unlink"):
        pipeline_links.link(group, [1 - rank], torch.device("cuda:0"), transport=GLOO)
    pipeline_links.unlink(group)
    cuda_group = dist.new_group(backend="cuda:gloo")
    with pytest.raises(ValueError, match="got a group without a backend for CPU tensors"):
        pipeline_links.link(cuda_group, [1 - rank], torch.device("cpu"), transport=GLOO)
    with pytest.raises(ValueError, match="pipeline_send: got a group without a backend for CPU tensors"):
        OPS.pipeline_send([torch.ones(2)], 1 - rank, 0, cuda_group.group_name)

    def transport_of_one_rank(
        store: dist.Store, rank: int, size: int, timeout: timedelta
    ) -> dist.distributed_c10d.Backend:
        return dist.ProcessGroupGloo(store, 0, 1, timeout)

    with pytest.raises(ValueError, match=rf"got a backend with rank 0 of 1; .* in which this process is rank {rank}"):
        pipeline_links.link(world, [1 - rank], torch.device("cpu"), transport=transport_of_one_rank)
    with pytest.raises(TypeError, match="got no backend; make one for each direction"):
        pipeline_links.link(world, [1 - rank], torch.device("cpu"), transport=lambda *_: None)


@on_ranks(3)
def test_peers_are_group_ranks(rank: int) -> None:
    """Peers are group ranks, and several groups may link the same two ranks."""
    x = torch.full((3,), float(rank))
    groups = [dist.new_group([0, 2], backend="cpu:weft"), dist.new_group([2, 0, 1], backend="cpu:weft")]
    for group in groups:
        if not isinstance(group, dist.ProcessGroup):
            continue  # this rank is not in the group
        group_rank, size = group.rank(), group.size()
        pipeline_links.link(
            group, [(group_rank + 1) % size, (group_rank - 1) % size], torch.device("cpu"), transport=GLOO
        )
        OPS.pipeline_send([x], (group_rank + 1) % size, 0, group.group_name)
        [got] = OPS.pipeline_wait(OPS.pipeline_recv([x], (group_rank - 1) % size, 0, group.group_name))
        assert got[0].item() == dist.get_process_group_ranks(group)[(group_rank - 1) % size]
        OPS.pipeline_flush(group.group_name)
        pipeline_links.unlink(group)


@on_ranks(2)
def test_failed_link_can_be_retried(rank: int) -> None:
    """Store entries of the first attempt are not read again."""
    group, attempts = dist.new_group(backend="cpu:weft"), []

    def failing_once(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.distributed_c10d.Backend:
        attempts.append(store)
        if len(attempts) == 1:
            store.set("0", "of the first attempt")
            raise RuntimeError("no such device")
        assert not store.check(["0"])
        return GLOO(store, rank, size, timeout)

    with pytest.raises(RuntimeError, match="no such device"):
        pipeline_links.link(group, [1 - rank], torch.device("cpu"), transport=failing_once)
    dist.barrier()
    pipeline_links.link(group, [1 - rank], torch.device("cpu"), transport=failing_once)
    pipeline_links.unlink(group)
