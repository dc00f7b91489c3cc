"""All-reduces of sparse tensors: the sum of the ranks' dense tensors, in rank order, with coalesced entries."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import weft
from ops.collectives.hosts import across_hosts
from support.ranks import on_ranks
from weft.collectives import BackendOptions, SlowNetwork

GLOO_DTYPES = ("float32", "float64", "int32", "int64", "uint8", "int8")
OTHER_DTYPES = ("float16", "bfloat16", "int16", "bool", "complex64", "complex128")
# Sparse dims, then dense dims.
SHAPES = [((7,), ()), ((5, 4), ()), ((2, 3, 2, 2, 3), ()), ((9,), (3,)), ((4, 3), (2, 5)), ((6,), (0,))]
ENTRIES = (5, 0, 8, 1)  # of each rank, before duplicates are added up


def sparse(rank: int, dtype: str, shape: tuple[tuple[int, ...], tuple[int, ...]], num_entries: int) -> Tensor:
    """Return the tensor of a rank, with indices in any order and duplicates."""
    generator = torch.Generator().manual_seed(1000 * rank + num_entries)
    sparse_dims, dense_dims = shape
    indices = torch.stack([torch.randint(0, size, (num_entries,), generator=generator) for size in sparse_dims])
    numbers = torch.randn(num_entries, *dense_dims, generator=generator, dtype=torch.float64)
    values = numbers if dtype.startswith(("float", "bfloat", "complex")) else numbers.mul(3).round().abs()
    return torch.sparse_coo_tensor(indices, values.to(getattr(torch, dtype)), sparse_dims + dense_dims)


def sum_of(parts: list[Tensor]) -> Tensor:
    """Return the sum of the parts in order, as a dense tensor: half types are added in float32."""
    dtype = parts[0].dtype
    is_half = dtype in (torch.float16, torch.bfloat16)
    total: Tensor | None = None
    for part in parts:
        dense = part.coalesce().to_dense()
        dense = dense.float() if is_half else dense
        total = dense if total is None else total + dense
    assert total is not None
    return total.to(dtype)


def check(actual: Tensor, parts: list[Tensor]) -> None:
    """Assert that `actual` holds the sum of the parts, bit for bit, with the entries of all parts."""
    assert actual.is_coalesced() and actual.dtype == parts[0].dtype and actual.shape == parts[0].shape
    assert actual.sparse_dim() == parts[0].sparse_dim()
    assert torch.equal(actual.to_dense(), sum_of(parts))
    stored = torch.cat([part._indices() for part in parts], dim=1)
    assert torch.equal(actual.indices(), torch.unique(stored, dim=1))


@on_ranks(1, 2, 4)
@across_hosts("aaaa", "aabb")
def test_sum_equals_the_dense_sum_and_gloo(rank: int, world_size: int) -> None:
    group, gloo = dist.new_group(backend="cpu:weft"), dist.new_group(backend="gloo")
    for dtype in (*GLOO_DTYPES, *OTHER_DTYPES):
        for shape in SHAPES:
            parts = [sparse(each, dtype, shape, ENTRIES[each]) for each in range(world_size)]
            tensor = parts[rank].clone()
            # Not dist.all_reduce: it views complex tensors as real ones, which sparse tensors do not support.
            group.allreduce([tensor]).wait()
            check(tensor, parts)
            if dtype not in GLOO_DTYPES or 0 in shape[1] or len(shape[0]) > 4:  # more dims than gloo supports
                continue
            expected = parts[rank].clone()
            dist.all_reduce(expected, group=gloo)
            assert torch.equal(tensor.indices(), expected.indices())
            assert torch.equal(tensor.values(), expected.values())


@on_ranks(3)
@across_hosts("aaa", "aba")
def test_no_entries_and_many_entries(rank: int, world_size: int) -> None:
    """No rank has entries; one rank has more than the staging buffers hold."""
    group = dist.new_group(backend="cpu:weft", pg_options=BackendOptions(staging_limit_bytes=1 << 16))
    for num_entries in ((0, 0, 0), (2, 20_000, 0)):
        parts = [sparse(each, "float64", ((40_000,), (2,)), num) for each, num in enumerate(num_entries)]
        tensor = parts[rank].clone()
        dist.all_reduce(tensor, group=group)
        check(tensor, parts)


@on_ranks(2)
@across_hosts("aa", "ab")
def test_sparse_and_dense_calls_in_flight(rank: int, world_size: int) -> None:
    """Sparse all-reduces keep their order with others, also without a wait; their works have results and futures."""
    group = dist.new_group(backend="cpu:weft")
    works, sparse_tensors, dense_tensors = [], [], []
    all_parts = []
    for step in range(10):
        all_parts.append([sparse(each, "float32", ((20,), (3,)), step + each) for each in range(world_size)])
        sparse_tensors.append(all_parts[-1][rank].clone())
        dense_tensors.append(torch.full((100,), float(step + rank)))
        works += [dist.all_reduce(each[-1], group=group, async_op=True) for each in (sparse_tensors, dense_tensors)]
    futures = [work.get_future().then(lambda future: future.value()[0].sum().item()) for work in works]
    sums = [future.wait() for future in futures[::-1]][::-1]
    for step, (parts, tensor, dense) in enumerate(zip(all_parts, sparse_tensors, dense_tensors, strict=True)):
        check(tensor, parts)
        assert torch.equal(dense, torch.full((100,), 2.0 * step + 1))
        assert sums[2 * step] == pytest.approx(sum_of(parts).sum().item(), abs=1e-4)
        assert sums[2 * step + 1] == dense.sum().item()


@on_ranks(2)
def test_invalid_tensors_raise_before_communication(rank: int, world_size: int) -> None:
    group = dist.new_group(backend="cpu:weft")
    part = sparse(rank, "float32", ((4,), ()), 3)
    calls = {  # torch itself refuses sparse tensors in other calls, and other layouts
        "got max for a sparse tensor; pass ReduceOp.SUM, or a dense tensor": (part, dist.ReduceOp.MAX),
        "got a sparse tensor of UInt16; pass one of": (part.to(torch.uint16), dist.ReduceOp.SUM),
    }
    for text, (tensor, op) in calls.items():
        if rank == 0:  # the other rank communicates nothing
            with pytest.raises(RuntimeError, match=text):
                dist.all_reduce(tensor, op=op, group=group)
    dist.all_reduce(part, group=group)  # the group remains usable
    check(part, [sparse(each, "float32", ((4,), ()), 3) for each in range(world_size)])


@on_ranks(2)
def test_log_and_slow_network(rank: int, world_size: int) -> None:
    network = SlowNetwork(ranks_per_host=1, seconds_per_message=0.0, bytes_per_second=1e9)
    group = dist.new_group(backend="cpu:weft", pg_options=BackendOptions(slow_network=network))
    parts = [torch.sparse_coo_tensor([[0, each + 1]], [1.0, 2.0], (4,)) for each in range(world_size)]
    tensor = parts[rank].clone()
    dist.all_reduce(tensor, group=group)
    check(tensor, parts)
    [call] = [call for call in weft._collectives.flight_log() if call["group"] == group.group_name]
    assert (call["call"], call["bytes"]) == ("sparse_all_reduce(sum, float32 [4], 1 sparse dim)", 2 * (4 + 8))


class Bag(nn.Module):
    """An embedding with sparse gradients, of which each rank uses other rows, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(30, 4, sparse=True), nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.embedding(ids).sum(1))


def train(model: nn.Module, batches: list[Tensor]) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for ids in batches:
        optimizer.zero_grad()
        loss = model(ids).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@on_ranks(2, 4)
@across_hosts("aaaa", "aabb")
def test_ddp_trains_a_sparse_embedding(rank: int, world_size: int) -> None:
    def ids_of(step: int, each: int) -> Tensor:
        generator = torch.Generator().manual_seed(10 * step + each)
        return torch.randint(5 * each, 5 * each + 10, (3, 6), generator=generator)  # overlaps with its neighbours'

    batches = [[ids_of(step, each) for each in range(world_size)] for step in range(4)]
    group = dist.new_group(backend="cpu:weft")
    torch.manual_seed(1)
    start = Bag().double().state_dict()
    expected = Bag().double()
    expected.load_state_dict(start)
    train(expected, [torch.cat(batch) for batch in batches])
    for options in ({}, {"static_graph": True}, {"gradient_as_bucket_view": True, "find_unused_parameters": True}):
        module = Bag().double()
        module.load_state_dict(start)
        model = DistributedDataParallel(module, process_group=group, **options)
        train(model, [batch[rank] for batch in batches])
        assert module.embedding.weight.grad is not None and module.embedding.weight.grad.is_sparse
        for name, value in module.state_dict().items():
            torch.testing.assert_close(value, expected.state_dict()[name], rtol=1e-12, atol=1e-12)
