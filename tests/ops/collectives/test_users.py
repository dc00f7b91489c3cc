"""PyTorch features that use process groups run unchanged on the weft backend."""

from __future__ import annotations

import copy
import itertools
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import weft  # noqa: F401  (registers the backend)
from ops.collectives.hosts import across_hosts
from support.ranks import on_ranks

_mesh_count = itertools.count()


def mesh_of(world_size: int, shape: tuple[int, ...] | None = None) -> DeviceMesh:
    """Return a mesh whose groups all run on the weft backend."""
    shape = shape or (world_size,)
    override = dict.fromkeys(range(len(shape)), "cpu:weft")
    # Unique names: DTensor caches meshes, also by name, and the groups of an earlier test are destroyed.
    names = tuple(f"dim{dim}_of_{next(_mesh_count)}" for dim in range(len(shape)))
    return init_device_mesh("cpu", shape, mesh_dim_names=names, backend_override=override)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.relu(self.up(x)))


def new_model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(Block(), Block()).double()


def data_of(rank: int) -> torch.Tensor:
    return torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def train(model: nn.Module, batches: list[torch.Tensor]) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for batch in batches:
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def check_weights(model: nn.Module, expected: nn.Module) -> None:
    wanted = dict(expected.named_parameters())
    for name, parameter in model.named_parameters():
        value = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        torch.testing.assert_close(value, wanted[name.removeprefix("module.")], rtol=1e-12, atol=1e-12)


@on_ranks(2, 4)
def test_dtensor_redistributes(rank: int, world_size: int) -> None:
    mesh = mesh_of(world_size)
    full = torch.arange(7.0 * 5).reshape(7, 5)  # uneven shards
    for source in (Shard(0), Shard(1), Replicate()):
        for target in (Shard(0), Shard(1), Replicate()):
            tensor = distribute_tensor(full.clone(), mesh, [source]).redistribute(placements=[target])
            assert torch.equal(tensor.full_tensor(), full)


@on_ranks(2, 4)
@across_hosts("aaaa", "aabb")
def test_tensor_parallel_plan_matches_one_device(rank: int, world_size: int) -> None:
    expected, model = new_model(), new_model()
    plan = {}
    for block in range(2):
        plan |= {f"{block}.up": ColwiseParallel(), f"{block}.down": RowwiseParallel()}
    parallelize_module(model, mesh_of(world_size), plan)
    batches = [data_of(step) for step in range(4)]
    assert train(model, batches) == pytest.approx(train(expected, batches), rel=1e-12)
    check_weights(model, expected)


@on_ranks(2, 4)
@across_hosts("aaaa", "aabb")
def test_fsdp2_matches_one_device(rank: int, world_size: int) -> None:
    """FSDP2 shards over a mesh of one axis, or replicates over the first of two axes and shards over the second."""
    batches = [[data_of(10 * step + each) for each in range(world_size)] for step in range(4)]
    expected = new_model()
    train(expected, [torch.cat(batch) for batch in batches])
    for shape in [(world_size,)] + ([(2, 2)] if world_size == 4 else []):
        model, mesh = new_model(), mesh_of(world_size, shape)
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        train(model, [batch[rank] for batch in batches])
        check_weights(model, expected)


@on_ranks(2, 4)
@across_hosts("aaaa", "aabb")
def test_ddp_matches_one_device(rank: int, world_size: int) -> None:
    batches = [[data_of(10 * step + each) for each in range(world_size)] for step in range(4)]
    expected = new_model()
    train(expected, [torch.cat(batch) for batch in batches])
    group = dist.new_group(backend="cpu:weft")
    for options in ({}, {"static_graph": True}, {"bucket_cap_mb": 0.001, "gradient_as_bucket_view": True}):
        model = DistributedDataParallel(new_model(), process_group=group, **options)
        train(model, [batch[rank] for batch in batches])
        check_weights(model, expected)


@on_ranks(2, 4)
@across_hosts("aaaa", "aabb")
def test_distributed_checkpoint_reshards(rank: int, world_size: int) -> None:
    group = dist.new_group(backend="cpu:weft")
    mesh = mesh_of(world_size)
    folder = [str(Path.cwd())]
    if rank == 0:
        import tempfile

        folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, 0, group=group)
    full = torch.arange(30.0).reshape(6, 5)
    state = {"sharded": distribute_tensor(full.clone(), mesh, [Shard(0)]), "step": torch.tensor(3)}
    dcp.save(copy.copy(state), checkpoint_id=folder[0], process_group=group)
    loaded = {"sharded": distribute_tensor(torch.zeros(6, 5), mesh, [Shard(1)]), "step": torch.tensor(0)}
    dcp.load(loaded, checkpoint_id=folder[0], process_group=group)
    assert torch.equal(loaded["sharded"].full_tensor(), full)
    assert loaded["step"].item() == 3
    dist.barrier(group=group)
    if rank == 0:
        import shutil

        shutil.rmtree(folder[0])


@on_ranks(2, 4)
@across_hosts("aaaa", "aabb")
def test_object_collectives(rank: int, world_size: int) -> None:
    group = dist.new_group(backend="cpu:weft")
    mine = {"rank": rank, "text": "x" * 1000 * rank}
    objects: list[object] = [None] * world_size
    dist.all_gather_object(objects, mine, group=group)
    expected = [{"rank": each, "text": "x" * 1000 * each} for each in range(world_size)]
    assert objects == expected
    gathered: list[object] | None = [None] * world_size if rank == 0 else None
    dist.gather_object(mine, gathered, dst=0, group=group)
    assert gathered == (expected if rank == 0 else None)
    scattered: list[object] = [None]
    dist.scatter_object_list(scattered, expected if rank == 0 else None, src=0, group=group)
    assert scattered == [expected[rank]]


@on_ranks(4)
@across_hosts("aaaa", "abbc")
def test_subgroups_and_split_groups(rank: int, world_size: int) -> None:
    """All-reduces of two groups of a mesh, launched in different orders, are in flight at once; then split_group."""
    mesh = mesh_of(world_size, (2, 2))
    rows, columns = mesh.get_group(0), mesh.get_group(1)
    works, tensors = [], []
    for step in range(10):
        for group in (rows, columns) if (rank + step) % 2 else (columns, rows):
            tensors.append((group, torch.full((1000,), float(rank))))
            works.append(dist.all_reduce(tensors[-1][1], group=group, async_op=True))
    for work in works[::-1]:
        work.wait()
    for group, tensor in tensors:
        total = sum(dist.get_process_group_ranks(group))
        assert torch.equal(tensor, torch.full((1000,), float(total)))

    parent = dist.new_group(backend="cpu:weft")
    backend = parent._get_backend(torch.device("cpu"))
    assert backend.supports_splitting
    child = parent.split_group([0, 2] if rank % 2 == 0 else [1, 3], group_name=f"half{rank % 2}")
    tensor = torch.full((3,), float(rank))
    child.allreduce([tensor]).wait()
    assert tensor.tolist() == [2.0 + 2 * (rank % 2)] * 3


@on_ranks(2)
@across_hosts("aa", "ab")
def test_monitored_barrier_and_sequence_numbers(rank: int, world_size: int) -> None:
    group = dist.new_group(backend="cpu:weft")
    # Before torch 2.15, dist.monitored_barrier requires a backend named gloo.
    group.monitored_barrier(timedelta(seconds=20), wait_all_ranks=True)
    backend = group._get_backend(torch.device("cpu"))  # torch 2.11 does not find a group's only backend by itself
    before = backend._get_sequence_number_for_group()
    dist.all_reduce(torch.ones(1), group=group)
    assert backend._get_sequence_number_for_group() == before + 1


@on_ranks(2)
def test_messages_do_not_count_as_collectives(rank: int, world_size: int) -> None:
    """torch's detailed debug mode compares the count between ranks, but not all ranks take part in a message."""
    group = dist.new_group(backend="cpu:weft")
    count = group._get_backend(torch.device("cpu"))._get_sequence_number_for_group
    before = count()
    if rank == 0:
        dist.send(torch.ones(3), 1, group=group)
    else:
        dist.recv(torch.ones(3), 0, group=group)
    assert count() == before
    dist.all_reduce(torch.ones(3), group=group)
    assert count() == before + 1
