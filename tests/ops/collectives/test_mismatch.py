"""Mismatched calls raise the same typed error on every rank, and never give a wrong result."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import weft
from ops.collectives.hosts import across_hosts
from support.ranks import on_ranks

Body = Callable[[dist.ProcessGroup, int], None]


def new_group(seconds: float = 20.0) -> dist.ProcessGroup:
    return dist.new_group(backend="cpu:weft", timeout=timedelta(seconds=seconds))


def sum_of(*shape: int, dtype: torch.dtype = torch.float32, op: str = "SUM") -> Body:
    return lambda group, rank: dist.all_reduce(
        torch.ones(shape, dtype=dtype), op=getattr(dist.ReduceOp, op), group=group
    )


def sparse_sum_of(sparse_dims: int, *shape: int) -> Body:
    return lambda group, rank: dist.all_reduce(torch.ones(shape).to_sparse(sparse_dims), group=group)


def barrier(group: dist.ProcessGroup, rank: int) -> None:
    dist.barrier(group=group)


def gather_of(size: int, expected: int | None = None) -> Body:
    def body(group: dist.ProcessGroup, rank: int) -> None:
        outputs = [torch.zeros(size if expected is None else expected) for _ in range(group.size())]
        dist.all_gather(outputs, torch.ones(size), group=group)

    return body


def broadcast_from(root: int, size: int = 4) -> Body:
    return lambda group, rank: dist.broadcast(torch.ones(size), root, group=group)


def reduce_scatter_of(size: int) -> Body:
    def body(group: dist.ProcessGroup, rank: int) -> None:
        dist.reduce_scatter_tensor(torch.zeros(size), torch.ones(size * group.size()), group=group)

    return body


def split(*sizes: int) -> Body:
    def body(group: dist.ProcessGroup, rank: int) -> None:
        dist.all_to_all_single(torch.zeros(4), torch.ones(4), list(sizes), list(sizes), group=group)

    return body


# The call of rank 1, the call of the other ranks, and the text of each in the error.
CASES: dict[str, tuple[Body, Body, str, str]] = {
    "sizes": (sum_of(200, 256), sum_of(100, 256), "[200, 256]", "[100, 256]"),
    "shapes of one size": (sum_of(3, 4), sum_of(2, 6), "[3, 4]", "[2, 6]"),
    "dtypes of one size": (sum_of(4, dtype=torch.int32), sum_of(4), "int32 [4]", "float32 [4]"),
    "dtypes": (sum_of(4, dtype=torch.float64), sum_of(4), "float64 [4]", "float32 [4]"),
    "reduction": (sum_of(4, op="MAX"), sum_of(4), "max", "sum"),
    "operations": (barrier, sum_of(4), "barrier()", "all_reduce(sum, float32 [4])"),
    "layouts": (sum_of(4, 2), sparse_sum_of(1, 4, 2), "all_reduce(sum, float32 [4, 2])", "[4, 2], 1 sparse dim)"),
    "sparse dims": (sparse_sum_of(1, 4, 2), sparse_sum_of(2, 4, 2), "1 sparse dim)", "2 sparse dims)"),
    "sparse shapes": (sparse_sum_of(1, 4, 2), sparse_sum_of(1, 5, 2), "[4, 2]", "[5, 2]"),
    "all_gather": (gather_of(6), gather_of(4), "6", "4"),
    "expected sizes": (gather_of(4, expected=5), gather_of(4), "receives [5, 5", "receives [4, 4"),
    "roots": (broadcast_from(1), broadcast_from(0), "root 1", "root 0"),
    "broadcast": (broadcast_from(0, 5), broadcast_from(0, 4), "[5]", "[4]"),
    "reduce_scatter": (reduce_scatter_of(3), reduce_scatter_of(2), "sends [3, 3", "sends [2, 2"),
}


def check_failed(group: dist.ProcessGroup, error: type[Exception]) -> None:
    """Assert that later calls of a failed group raise the same error; destroy the group."""
    for again in (sum_of(4), barrier, broadcast_from(0)):
        with pytest.raises(error):
            again(group, dist.get_rank())
    dist.destroy_process_group(group)


@on_ranks(2, 4)
@pytest.mark.parametrize("case", CASES)
def test_same_error_on_every_rank(rank: int, world_size: int, case: str) -> None:
    other, usual, other_text, usual_text = CASES[case]
    group = new_group()
    sum_of(4)(group, rank)
    with pytest.raises(weft.CollectiveMismatchError) as caught:
        (other if rank == 1 else usual)(group, rank)
        dist.barrier(group=group)  # for calls that a rank may complete before the others detect the mismatch
    text = str(caught.value)
    assert isinstance(caught.value, RuntimeError)
    assert "made calls that do not match" in text
    assert other_text in text and usual_text in text, text
    assert "rank 1 called" in text
    texts: list[str] = [""] * world_size
    dist.all_gather_object(texts, text)
    assert len(set(texts)) == 1, texts
    check_failed(group, weft.CollectiveMismatchError)


@on_ranks(2)
def test_mismatched_splits_raise(rank: int, world_size: int) -> None:
    group = new_group()
    with pytest.raises(weft.CollectiveMismatchError, match=r"sends \[1, 3\]"):
        (split(1, 3) if rank == 1 else split(2, 2))(group, rank)
    check_failed(group, weft.CollectiveMismatchError)


@on_ranks(2, 3)
@pytest.mark.parametrize(("sent", "received"), [(10, 4), (4, 10), (4000, 10)])
def test_mismatched_message_sizes_raise(rank: int, world_size: int, sent: int, received: int) -> None:
    """Gloo aborts in the first case and leaves stale values in the second."""
    group = new_group()
    buffer = torch.full((received,), 7.0)
    with pytest.raises(weft.CollectiveMismatchError, match=rf"{sent}.*{received}|{received}.*{sent}"):
        if rank == 0:
            dist.send(torch.ones(sent), 1, group=group)
        elif rank == 1:
            dist.recv(buffer, 0, group=group)
        dist.barrier(group=group)
    assert torch.equal(buffer, torch.full((received,), 7.0))
    check_failed(group, weft.CollectiveMismatchError)


@on_ranks(2, 4)
def test_mismatched_order_of_operations_raises(rank: int, world_size: int) -> None:
    group = new_group()
    calls = [sum_of(4), gather_of(3)]
    with pytest.raises(weft.CollectiveMismatchError, match=r"all_reduce.*all_gather|all_gather.*all_reduce"):
        for call in calls[::-1] if rank == 1 else calls:
            call(group, rank)


def coalesced(group: dist.ProcessGroup, num_tensors: int) -> None:
    dist.all_reduce_coalesced([torch.ones(4) for _ in range(num_tensors)], group=group)


@on_ranks(2, 3)
@across_hosts("aaa", "aba")
def test_coalesced_calls_of_two_lengths_raise(rank: int, world_size: int) -> None:
    """The first tensor's call compares the lengths, because a rank's next call could match a missing tensor's call."""
    group = new_group()
    with pytest.raises(weft.CollectiveMismatchError, match=r"float32 \[4\], tensor 1 of 3\).*tensor 1 of 2"):
        coalesced(group, 2 if rank == 1 else 3)
        dist.barrier(group=group)
    check_failed(group, weft.CollectiveMismatchError)


@on_ranks(2)
@across_hosts("aa", "ab")
def test_different_eight_bit_formats_raise(rank: int, world_size: int) -> None:
    group = new_group()
    dtype = torch.float8_e5m2 if rank == 1 else torch.float8_e4m3fn
    with pytest.raises(weft.CollectiveMismatchError, match=r"float8_e4m3fn \[4\].*float8_e5m2 \[4\]"):
        dist.broadcast(torch.ones(4).to(dtype), 0, group=group)
        dist.barrier(group=group)
    check_failed(group, weft.CollectiveMismatchError)


@on_ranks(2)
def test_messages_of_two_dtypes_raise(rank: int, world_size: int) -> None:
    group = new_group()
    with pytest.raises(weft.CollectiveMismatchError, match=r"sent float32 4 elements.*recv\(int32 4 elements"):
        if rank == 0:
            dist.send(torch.ones(4), 1, group=group)
        else:
            dist.recv(torch.zeros(4, dtype=torch.int32), 0, group=group)
        dist.barrier(group=group)
    check_failed(group, weft.CollectiveMismatchError)


@on_ranks(3)
def test_mismatched_options_raise(rank: int, world_size: int) -> None:
    """A different limit means a different layout of the shared memory."""
    options = weft.collectives.BackendOptions(staging_limit_bytes=2**20 if rank == 2 else 2**24)
    with pytest.raises(weft.CollectiveMismatchError) as caught:
        dist.new_group(backend="cpu:weft", pg_options=options, timeout=timedelta(seconds=20))
    text = str(caught.value)
    assert "staging_limit_bytes: rank 2 has 1048576; ranks 0, 1 have 16777216; pass the same" in text, text
    sum_of(4)(new_group(), rank)


@on_ranks(3)
@across_hosts("aab")
def test_options_may_differ_between_hosts(rank: int, world_size: int) -> None:
    options = weft.collectives.BackendOptions(staging_limit_bytes=2**20 if rank == 2 else 2**24)
    tensor = torch.full((100_000,), float(rank))
    dist.all_reduce(tensor, group=dist.new_group(backend="cpu:weft", pg_options=options))
    assert torch.equal(tensor, torch.full_like(tensor, 3.0))


@on_ranks(2)
def test_nan_propagates(rank: int, world_size: int) -> None:
    group = new_group()
    for op in ("SUM", "AVG", "PRODUCT", "MIN", "MAX"):
        tensor = torch.tensor([float("nan") if rank == 0 else 1.0, 1.0])
        dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op), group=group)
        assert tensor[0].isnan() and not tensor[1].isnan(), op


@on_ranks(2)
def test_error_class_is_preserved(rank: int, world_size: int) -> None:
    """Works, futures, functional collectives, weft's operators and the backward pass raise CollectiveMismatchError."""
    import torch.distributed._functional_collectives as funcol

    def waits(group: dist.ProcessGroup) -> None:
        dist.all_reduce(torch.ones(2 + rank), group=group, async_op=True).wait()

    def future(group: dist.ProcessGroup) -> None:
        dist.all_reduce(torch.ones(2 + rank), group=group, async_op=True).get_future().wait()

    def functional(group: dist.ProcessGroup) -> None:
        funcol.all_reduce(torch.ones(2 + rank), "sum", group).wait()

    def operator(group: dist.ProcessGroup) -> None:
        torch.ops.weft.reduce_from_group(torch.ones(2 + rank), group.group_name)

    def backward(group: dist.ProcessGroup) -> None:
        x = torch.ones(2 + rank, requires_grad=True)
        torch.ops.weft.copy_to_group(x, group.group_name).sum().backward()

    for path in (waits, future, functional, operator, backward):
        group = new_group()
        with pytest.raises(weft.CollectiveMismatchError, match=rf"float32 \[{2 + rank}\]"):
            path(group)
        dist.destroy_process_group(group)


@on_ranks(2, 4)
def test_generated_mismatches_raise(rank: int, world_size: int) -> None:
    """One rank changes one property of a call; hypothesis draws the change, the same on every rank."""
    from hypothesis import HealthCheck, given, seed, settings
    from hypothesis import strategies as st

    dtypes = [torch.float32, torch.float64, torch.int32, torch.bfloat16, torch.uint8]
    calls = {"all_reduce": sum_of(4), "all_gather": gather_of(4), "broadcast": broadcast_from(0), "barrier": barrier}

    @seed(20261121)
    @settings(max_examples=30, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(
        st.lists(st.integers(1, 6), min_size=1, max_size=3),
        st.sampled_from(dtypes),
        st.sampled_from(["shape", "dtype", "operation"]),
        st.integers(0, world_size - 1),
        st.integers(1, 4),
        st.sampled_from(sorted(calls)),
        st.sampled_from(dtypes),
    )
    def check(shape, dtype, changed_property, changed_rank, extra, other_call, other_dtype) -> None:
        call: Body = sum_of(*shape, dtype=dtype)
        if rank == changed_rank:
            if changed_property == "shape":
                call = sum_of(*shape[:-1], shape[-1] + extra, dtype=dtype)
            elif changed_property == "dtype":
                call = sum_of(*shape, dtype=other_dtype)
            elif other_call != "all_reduce":
                call = calls[other_call]
        matches = (changed_property == "dtype" and other_dtype == dtype) or (
            changed_property == "operation" and other_call == "all_reduce"
        )
        group = new_group()
        if matches:
            call(group, rank)
        else:
            with pytest.raises(weft.CollectiveMismatchError, match=rf"\brank {changed_rank} called"):
                call(group, rank)
                dist.barrier(group=group)
        dist.destroy_process_group(group)

    check()
