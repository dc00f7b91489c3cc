"""Values on the weft backend equal gloo's for dtypes that gloo supports, and plain arithmetic for others."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import weft  # noqa: F401  (registers the backend)
from ops.collectives.calls import DATA_MOVEMENTS, REDUCE_OPS, REDUCTIONS
from ops.collectives.hosts import across_hosts
from ops.memory.counting import counted
from support.ranks import on_ranks

GLOO_DTYPES = ("float32", "float64", "float16", "bfloat16", "uint8", "int8", "int32", "int64", "bool")
OTHER_DTYPES = ("int16", "uint16", "uint32", "uint64", "complex64", "complex128", "float8_e4m3fn")
TOLERANCE = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-6, "float64": 1e-12}


def values(rank: int, key: object, shape: tuple[int, ...], dtype: str) -> Tensor:
    """Return the input of rank `rank`: small integers, which are exact in half-precision dtypes and in products."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{rank} {key}".encode()))
    numbers = torch.randint(0, 2 if dtype == "bool" else 4, shape, generator=generator)
    if dtype.startswith("complex"):
        return torch.complex(numbers.double(), numbers.double() - 1).to(getattr(torch, dtype))
    return numbers.to(getattr(torch, dtype))


def strided(tensor: Tensor) -> Tensor:
    """Return the same values, strided: every second element of a larger storage, with the last dim outermost."""
    wide = torch.zeros((*tensor.shape, 2), dtype=tensor.dtype)
    wide[..., 0] = tensor
    flipped = wide[..., 0]
    return flipped.transpose(0, -1).contiguous().transpose(0, -1) if tensor.dim() > 1 else flipped


def maker(rank: int, dtype: str, layout: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda key, *shape: layout(values(rank, key, shape, dtype))


def check_close(actual: list[Tensor], expected: list[Tensor], dtype: str, label: str) -> None:
    assert len(actual) == len(expected), label
    for mine, theirs in zip(actual, expected, strict=True):
        tolerance = TOLERANCE.get(dtype, 0.0)
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance, msg=lambda text: f"{label}: {text}")


def is_reducible(op: str, dtype: str) -> bool:
    if dtype.startswith("float8"):
        return False
    if dtype.startswith("complex"):
        return op in ("SUM", "AVG")
    if op in ("BAND", "BOR", "BXOR"):
        return not dtype.startswith(("float", "bfloat"))
    return op != "AVG" or dtype != "bool"


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("dtype", GLOO_DTYPES)
def test_equals_gloo(rank: int, world_size: int, dtype: str) -> None:
    check_against_gloo(rank, world_size, dtype)


@on_ranks(2, 4)
@across_hosts("abba")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool"])
def test_equals_gloo_across_hosts(rank: int, world_size: int, dtype: str) -> None:
    check_against_gloo(rank, world_size, dtype)


def check_against_gloo(rank: int, world_size: int, dtype: str) -> None:
    """Gloo gets contiguous tensors; weft gets contiguous and strided ones. Only weft supports AVG of integers."""
    gloo_group, weft_group = dist.new_group(backend="gloo"), dist.new_group(backend="cpu:weft")
    calls = dict(DATA_MOVEMENTS)
    for name, reduction in REDUCTIONS.items():
        for op in REDUCE_OPS:
            is_floating = dtype.startswith(("float", "bfloat"))
            if is_reducible(op, dtype) and (is_floating or op != "AVG"):
                calls[f"{name} {op}"] = reduction(op)
    for name, call in calls.items():
        expected = call(gloo_group, rank, world_size, maker(rank, dtype, torch.clone))
        for layout in (torch.clone, strided):
            actual = call(weft_group, rank, world_size, maker(rank, dtype, layout))
            check_close(actual, expected, dtype, f"{name} {layout.__name__}")


@on_ranks(2, 3)
@across_hosts("aaaa", "abba")
@pytest.mark.parametrize("dtype", OTHER_DTYPES)
def test_dtypes_unsupported_by_gloo_match_torch(rank: int, world_size: int, dtype: str) -> None:
    """Data movement equals gloo's on the same bytes; sums and averages equal torch's."""
    gloo_group, group = dist.new_group(backend="gloo"), dist.new_group(backend="cpu:weft")
    size = torch.empty(0, dtype=getattr(torch, dtype)).element_size()

    def make_bytes(key: object, *shape: int) -> Tensor:
        return values(rank, key, shape, dtype).view(torch.uint8).reshape(*shape[:-1], shape[-1] * size)

    for name, call in DATA_MOVEMENTS.items():
        if name == "all_to_all_single":
            continue  # its split sizes count rows, of which the bytes have a different number
        expected = call(gloo_group, rank, world_size, make_bytes)
        actual = call(group, rank, world_size, maker(rank, dtype, torch.clone))
        actual = [tensor.view(torch.uint8).reshape(tensor.shape[0], -1).flatten() for tensor in actual]
        check_close(actual, [tensor.flatten() for tensor in expected], "uint8", name)
    if not is_reducible("SUM", dtype):
        return
    work_dtype = torch.complex128 if dtype.startswith("complex") else torch.int64
    inputs = [values(each, "x", (3, 5), dtype).to(work_dtype) for each in range(world_size)]
    total = sum(inputs[1:], inputs[0])
    for op, expected in (("SUM", total), ("AVG", total / world_size if total.is_complex() else total // world_size)):
        (actual,) = REDUCTIONS["all_reduce"](op)(group, rank, world_size, maker(rank, dtype, torch.clone))
        torch.testing.assert_close(actual.to(work_dtype), expected, rtol=1e-6, atol=1e-6)


@on_ranks(2, 4)
@across_hosts("aaaa", "abba")
@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8"])
def test_averages_of_integers_truncate(rank: int, world_size: int, dtype: str) -> None:
    tensor = torch.tensor([rank, 3, -rank if dtype != "uint8" else 0]).to(getattr(torch, dtype))
    dist.all_reduce(tensor, op=dist.ReduceOp.AVG, group=dist.new_group(backend="cpu:weft"))
    total = world_size * (world_size - 1) // 2
    least = -(total // world_size) if dtype != "uint8" else 0
    assert tensor.tolist() == [total // world_size, 3, least]


@on_ranks(2, 3)
@across_hosts("aaaa", "abba")
def test_large_and_uneven_tensors(rank: int, world_size: int) -> None:
    """Tensors larger than the staging buffers, and lists whose tensors differ from rank to rank."""
    group = dist.new_group(backend="cpu:weft")
    size = 3_000_001
    tensor = torch.arange(size, dtype=torch.float32) % 1000 + rank
    dist.all_reduce(tensor, group=group)
    expected = (torch.arange(size, dtype=torch.float32) % 1000) * world_size + sum(range(world_size))
    assert torch.equal(tensor, expected)

    outputs = [torch.zeros(1000 * each, 3) for each in range(world_size)]
    dist.all_gather(outputs, torch.full((1000 * rank, 3), float(rank)), group=group)
    for each, tensor in enumerate(outputs):
        assert torch.equal(tensor, torch.full((1000 * each, 3), float(each)))

    output = torch.zeros(rank + 1, 2)
    dist.reduce_scatter(output, [torch.full((each + 1, 2), 1.0 + each) for each in range(world_size)], group=group)
    assert torch.equal(output, torch.full((rank + 1, 2), world_size * (1.0 + rank)))

    received = [torch.zeros(each + rank + 1) for each in range(world_size)]
    inputs = [torch.full((each + rank + 1,), 10.0 * rank + each) for each in range(world_size)]
    dist.all_to_all(received, inputs, group=group)
    for each, tensor in enumerate(received):
        assert torch.equal(tensor, torch.full((each + rank + 1,), 10.0 * each + rank))


@on_ranks(2, 3)
@across_hosts("aaa", "aba")
@pytest.mark.parametrize("size", [6, 600_000])
def test_inputs_may_overlap_outputs(rank: int, world_size: int, size: int) -> None:
    """An output may overlap this rank's input: the values equal those of a call with a copy of the input."""
    group = dist.new_group(backend="cpu:weft")
    values = torch.arange(size, dtype=torch.float64)

    shards = [torch.zeros(size, dtype=torch.float64) for _ in range(world_size)]
    shards[0].copy_(values + rank)
    dist.all_gather(shards, shards[0], group=group)
    assert all(torch.equal(shard, values + each) for each, shard in enumerate(shards))

    full = torch.zeros(world_size, size, dtype=torch.float64)
    full[-1] = values + rank
    dist.all_gather_into_tensor(full, full[-1], group=group)
    assert all(torch.equal(full[each], values + each) for each in range(world_size))

    inputs = [values * (each + 1) + rank for each in range(world_size)]
    dist.reduce_scatter(inputs[0], inputs, group=group)
    assert torch.equal(inputs[0], values * (rank + 1) * world_size + sum(range(world_size)))

    full = torch.stack([values * (each + 1) + rank for each in range(world_size)])
    dist.reduce_scatter_tensor(full[0], full, group=group)
    assert torch.equal(full[0], values * (rank + 1) * world_size + sum(range(world_size)))

    inputs = [values + rank, values - rank]
    outputs = [torch.zeros(world_size, size, dtype=torch.float64) for _ in inputs]
    inputs[1] = outputs[0][0].copy_(inputs[1])
    group.allgather_into_tensor_coalesced(outputs, inputs, dist.distributed_c10d.AllgatherOptions()).wait()
    assert all(torch.equal(outputs[0][each], values + each) for each in range(world_size))
    assert all(torch.equal(outputs[1][each], values - each) for each in range(world_size))

    inputs = [values + each for each in range(world_size)]
    dist.scatter(inputs[-1], inputs if rank == 0 else None, src=0, group=group)
    assert torch.equal(inputs[-1], values + rank)


@on_ranks(2)
def test_no_unneeded_copies(rank: int, world_size: int) -> None:
    """Only strided outputs and overlapping inputs need temporary tensors; calls in place, like FSDP2's, need none."""
    group = dist.new_group(backend="cpu:weft")
    size = 100_000
    full, shard = torch.ones(world_size, size), torch.ones(size)
    wide = torch.zeros(world_size, size, 2)[:, :, 0]
    calls: dict[str, tuple[Callable[[], object], int]] = {  # call, number of temporary tensors
        "all_gather in place": (lambda: dist.all_gather_into_tensor(full, full[rank], group=group), 0),
        "reduce_scatter in place": (lambda: dist.reduce_scatter_tensor(full[rank], full, group=group), 0),
        "all_gather list": (lambda: dist.all_gather(list(full), shard, group=group), 0),
        "all_to_all of halves": (lambda: dist.all_to_all_single(full[1], full[0], group=group), 0),
        "all_gather of columns": (lambda: dist.all_gather(list(wide), shard, group=group), world_size),
        "all_gather with overlap": (lambda: dist.all_gather_into_tensor(full, full[1 - rank], group=group), 1),
    }
    for name, (call, num_tensors) in calls.items():
        for _ in range(4):
            call()  # warm up: allocate all shared memory pages that the call writes
        with counted() as count:
            before = count.now()
            call()
            assert count.peak() - before <= num_tensors * 4 * size + 50_000, name
            assert count.peak() - before >= num_tensors * 4 * size, name


@on_ranks(1, 2, 4)
@across_hosts("aaaa", "abca")
def test_coalesced_calls(rank: int, world_size: int) -> None:
    group = dist.new_group(backend="cpu:weft")
    tensors = [torch.full((size,), rank + 1.0) for size in (1, 70, 5)]
    dist.all_reduce_coalesced(tensors, group=group)
    total = world_size * (world_size + 1) / 2
    assert all(torch.equal(tensor, torch.full_like(tensor, total)) for tensor in tensors)

    opts = dist.distributed_c10d.AllgatherOptions()
    inputs = [torch.full((size,), float(rank)) for size in (2, 3)]
    outputs = [torch.zeros(size * world_size) for size in (2, 3)]
    group.allgather_into_tensor_coalesced(outputs, inputs, opts).wait()
    for output, size in zip(outputs, (2, 3), strict=True):
        assert torch.equal(output, torch.arange(world_size).repeat_interleave(size).float())

    lists = [[torch.zeros(size) for size in (2, 3)] for _ in range(world_size)]
    dist.all_gather_coalesced(lists, inputs, group=group)
    for each, gathered in enumerate(lists):
        assert all(torch.equal(tensor, torch.full_like(tensor, each)) for tensor in gathered)

    full = [torch.arange(size * world_size, dtype=torch.float32) for size in (2, 3)]
    shards = [torch.zeros(size) for size in (2, 3)]
    group.reduce_scatter_tensor_coalesced(shards, full, dist.distributed_c10d.ReduceScatterOptions()).wait()
    for shard, source in zip(shards, full, strict=True):
        assert torch.equal(shard, source.chunk(world_size)[rank] * world_size)


@on_ranks(2, 4)
def test_sums_are_bitwise_deterministic(rank: int, world_size: int) -> None:
    """One-shot, segmented and chunked all-reduces and reduce-scatters sum in the order of the ranks."""
    group = dist.new_group(backend="cpu:weft")
    scales = [10.0**each for each in range(world_size)]
    inputs = [torch.randn(5_000_000, generator=torch.Generator().manual_seed(each)) for each in range(world_size)]
    inputs = [tensor * scale for tensor, scale in zip(inputs, scales, strict=True)]
    expected = inputs[0].clone()
    for tensor in inputs[1:]:
        expected += tensor
    for size in (7, 5_000, 200_000, 5_000_000):
        for _ in range(2):
            tensor = inputs[rank][:size].clone()
            dist.all_reduce(tensor, group=group)
            assert torch.equal(tensor, expected[:size])
        even = size - size % world_size
        output = torch.empty(even // world_size)
        dist.reduce_scatter_tensor(output, inputs[rank][:even].clone(), group=group)
        assert torch.equal(output, expected[:even].chunk(world_size)[rank])


@on_ranks(2, 4)
@across_hosts("aaaa", "abba")
def test_messages_from_any_source_in_any_order(rank: int, world_size: int) -> None:
    """Ranks post sends in ascending or descending rank order, receives in reverse order, and wait in either order."""
    group = dist.new_group(backend="cpu:weft")
    peers = [each for each in range(world_size) if each != rank]
    for size in (3, 2_000_000):
        for order in (peers, peers[::-1]):
            outgoing = [torch.full((size,), float(rank))] * len(peers)
            incoming = [torch.zeros(size) for _ in peers]
            works = [dist.isend(each, peer, group=group) for each, peer in zip(outgoing, order, strict=True)]
            works += [dist.irecv(each, peer, group=group) for each, peer in zip(incoming, order[::-1], strict=True)]
            for work in works if rank % 2 else works[::-1]:
                work.wait()
            for each, peer in zip(incoming, order[::-1], strict=True):
                assert torch.equal(each, torch.full((size,), float(peer)))
    if rank == 0:
        seen = set()
        for _ in peers:
            tensor = torch.zeros(2)
            source = dist.recv(tensor, group=group)
            assert tensor.tolist() == [source, source]
            seen.add(source)
        assert seen == set(peers)
    else:
        dist.send(torch.full((2,), float(rank)), 0, group=group)


@on_ranks(2)
@across_hosts("aaaa", "abba")
def test_batched_messages_arrive(rank: int, world_size: int) -> None:
    group = dist.new_group(backend="cpu:weft")
    sent, received = torch.full((1000,), float(rank)), torch.zeros(1000)
    operations = [dist.P2POp(dist.isend, sent, 1 - rank, group), dist.P2POp(dist.irecv, received, 1 - rank, group)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert torch.equal(received, torch.full((1000,), 1.0 - rank))


@on_ranks(2, 4)
@across_hosts("aaaa", "abba")
def test_asynchronous_works_complete_in_any_order(rank: int, world_size: int) -> None:
    group = dist.new_group(backend="cpu:weft")
    tensors = [torch.full((1000 * (each + 1),), rank + 1.0) for each in range(6)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    total = world_size * (world_size + 1) / 2
    seen = []
    chained = works[3].get_future().then(lambda future: seen.append(future.value()[0][0].item()))
    for work in works[::-1]:
        assert work.wait()
        assert work.is_completed()
        assert work.is_success()
    chained.wait()
    assert seen == [total]
    assert all(torch.equal(tensor, torch.full_like(tensor, total)) for tensor in tensors)
    # The background thread completes a work that no other thread waits for.
    work = dist.all_reduce(tensors[0], group=group, async_op=True)
    future = work.get_future()
    future.wait()
    assert torch.equal(future.value()[0], torch.full_like(tensors[0], total * world_size))
