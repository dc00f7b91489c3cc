"""The ranks of a tensor-parallel group start equal, draw equal random numbers and get equal batches."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import lightning as L
import numpy
import pytest
import torch
import torch.distributed as dist
from lightning_plugin.scripts.plugin_models import (
    BATCH,
    DIM,
    Model,
    fixed_data,
    loader,
    set_torchrun_environment,
    trainer,
    weights,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.data import Dataset, IterableDataset

from support.ranks import on_ranks
from weft._plugin.batch_check import BatchCheck, batch_digest
from weft._plugin.replicas import broadcast_values, random_state_of_first_rank
from weft.lightning import WeftModelParallelStrategy


def _on_all_ranks(value: object, world_size: int) -> list[object]:
    gathered: list[object] = [None] * world_size
    dist.all_gather_object(gathered, value)
    return gathered


def _seed_differently(rank: int) -> None:
    """Seed each rank differently, as ranks are without `seed_everything`."""
    random.seed(rank)
    numpy.random.seed(rank)
    torch.manual_seed(rank)


def _draw() -> tuple[float, float, float]:
    return random.random(), numpy.random.rand(), torch.rand(()).item()


@on_ranks(2, 3)
def test_ranks_stay_equal_without_seed_everything(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    _seed_differently(rank)
    model = Model(dropout=0.5, seed=None)
    expected = model.state_dict()  # before sharding; rank 0's values are broadcast below
    expected = {name: value.clone() for name, value in expected.items()}
    dist.broadcast_object_list(shared := [expected], src=0)
    drawn = {}
    model.on_fit_start = lambda: drawn.setdefault("at start", weights(model))
    run = trainer(world_size, "weft", tmp_path)
    run.fit(model, loader(shuffle=True))
    for name, value in drawn["at start"].items():
        assert torch.equal(value, shared[0][name]), name
    assert torch.equal(model.offset, shared[0]["offset"])
    after = (_draw(), model.losses, [b.tolist() for b in model.batches], weights(model)["norm.weight"].tolist())
    assert all(other == after for other in _on_all_ranks(after, world_size))


@on_ranks(2)
def test_rank_local_draws_in_hooks_keep_losses_equal(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    model = Model(dropout=0.5)
    model.on_fit_start = lambda: _draw() if rank == 0 else None
    trainer(world_size, "weft", tmp_path).fit(model, loader())
    assert len(set(map(tuple, _on_all_ranks(tuple(model.losses), world_size)))) == 1


@on_ranks(2)
@pytest.mark.parametrize("name", ["own", "data_parallel"])
def test_shards_of_other_meshes_are_kept(rank: int, world_size: int, name: str) -> None:
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("data_parallel",))
    other_mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=(name,))
    model = nn.Module()
    for key, placement in (("sharded", Shard(0)), ("replicated", Replicate())):
        value = DTensor.from_local(torch.full((3,), float(rank)), other_mesh, [placement])
        model.register_parameter(key, nn.Parameter(value))
    model.plain = nn.Parameter(torch.full((3,), float(rank)))
    broadcast_values(model, mesh, torch.device("cpu"))
    assert torch.equal(model.sharded.to_local(), torch.full((3,), float(rank)))
    assert torch.equal(model.replicated.to_local(), torch.zeros(3))
    assert torch.equal(model.plain, torch.zeros(3))


@on_ranks(2)
@pytest.mark.parametrize("seeded", ["torch", "python"])
def test_generator_states_are_restored(rank: int, world_size: int, seeded: str) -> None:
    mesh = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("data_parallel", "tensor_parallel"))
    random.seed(0 if seeded == "python" else rank)
    torch.manual_seed(0 if seeded == "torch" else rank)
    numpy.random.seed(rank)
    before = _draw()
    groups = mesh.get_group("data_parallel"), mesh.get_group("tensor_parallel")
    with random_state_of_first_rank(*groups, torch.device("cpu")):
        inside = _draw()
    after = _draw()
    left, right = _on_all_ranks(inside, world_size)
    assert left == right
    equal = [left == right for left, right in zip(*_on_all_ranks(after, world_size), strict=True)]
    assert equal == [seeded == "python", False, seeded == "torch"]
    for number, is_equal in enumerate(equal):
        assert after[number] != before[number]
        assert not is_equal or after[number] != inside[number], "must not repeat the draw inside"


class _RandomStream(IterableDataset):
    def __iter__(self):
        for _ in range(3 * BATCH):
            yield torch.rand(DIM, dtype=torch.float64)


class _RandomSamples(Dataset):
    def __len__(self) -> int:
        return 2 * BATCH

    def __getitem__(self, idx: int) -> Tensor:
        return fixed_data()[idx] + random.random() + numpy.random.rand() + torch.rand(())


@on_ranks(2)
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("seeded", [False, True], ids=["unseeded", "seed_everything"])
@pytest.mark.parametrize("data", [_RandomStream, _RandomSamples])
def test_random_data_are_equal_on_all_ranks(
    rank: int, world_size: int, tmp_path: Path, num_workers: int, seeded: bool, data: type[Dataset]
) -> None:
    set_torchrun_environment(rank, world_size)
    if seeded:
        L.seed_everything(100, workers=True, verbose=False)
    else:
        _seed_differently(rank)
    model = Model()
    options = {"num_workers": num_workers, "multiprocessing_context": "fork" if num_workers else None}
    strategy = WeftModelParallelStrategy(plan="auto", check_batches=2)
    trainer(world_size, strategy, tmp_path).fit(model, loader(data(), **options))
    mine, other = _on_all_ranks([b.tolist() for b in model.batches], world_size)
    assert mine == other
    assert len(mine) >= 2
    assert mine[0] != mine[1]


@on_ranks(2)
def test_different_seeds_give_equal_batches(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    L.seed_everything(rank, workers=True, verbose=False)
    model = Model(seed=None)
    run = trainer(world_size, "weft", tmp_path, use_distributed_sampler=True)
    run.fit(model, loader(_RandomSamples(), num_workers=1, multiprocessing_context="fork"))
    mine, other = _on_all_ranks([b.tolist() for b in model.batches], world_size)
    assert mine == other


class _ShardedByRank(IterableDataset):
    """A data set that is correct under data parallelism, and wrong under tensor parallelism."""

    def __init__(self, num_equal: int = 0) -> None:
        self.num_equal = num_equal

    def __iter__(self):
        for idx in range(4):
            for sample in fixed_data()[:BATCH]:
                yield sample + (0 if idx < self.num_equal else dist.get_rank() // 2)


@on_ranks(2, 4)
def test_different_batches_raise(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    if world_size == 2:
        data = [s + rank for s in fixed_data()]
        parties = "rank 0 and rank 1"
    else:
        data = _ShardedByRank()
        parties = "ranks 0, 1 and ranks 2, 3"
    with pytest.raises(ValueError, match=f"training batch 0 differs between {parties}"):
        trainer(world_size, "weft", tmp_path).fit(Model(), loader(data))
    with pytest.raises(ValueError, match=f"prediction batch 0 differs between {parties}"):
        trainer(world_size, "weft", tmp_path).predict(Model(), loader(data))


@on_ranks(4)
def test_every_nth_batch_is_compared(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    unchecked = WeftModelParallelStrategy(plan="auto", check_batches=0)
    trainer(world_size, unchecked, tmp_path).predict(Model(), loader(_ShardedByRank()))
    late = _ShardedByRank(num_equal=3)
    trainer(world_size, "weft", tmp_path).predict(Model(), loader(late))
    every = WeftModelParallelStrategy(plan="auto", check_batches=1, check_batches_every=3)
    with pytest.raises(ValueError, match="prediction batch 3 differs"):
        trainer(world_size, every, tmp_path).predict(Model(), loader(late))


@dataclass
class _Sample:
    image: Tensor
    name: str


def test_digest_covers_nested_batches() -> None:
    image = torch.arange(6.0).reshape(2, 3)

    def digest(value: Tensor) -> int:
        return batch_digest({"x": [(_Sample(value, "a"), 3)], "empty": torch.empty(0, 4)})

    assert digest(image) == digest(image.clone())
    assert digest(image) == digest(image.T.contiguous().T)
    for other in (image + 1, image.reshape(3, 2), image.double(), -image):
        assert digest(other) != digest(image)
    assert batch_digest(torch.eye(2).to_sparse()) != batch_digest(2 * torch.eye(2).to_sparse())
    assert batch_digest(torch.tensor(1.0, dtype=torch.bfloat16)) != batch_digest(torch.tensor(2, dtype=torch.bfloat16))


@on_ranks(2)
def test_batch_check_counts_each_loop(rank: int, world_size: int) -> None:
    check, device = BatchCheck(num_first=1, every=0), torch.device("cpu")
    group = dist.group.WORLD
    equal, different = torch.zeros(2), torch.full((2,), float(rank))
    check.check("training", equal, group, device)
    check.check("training", different, group, device)  # the second batch is not compared
    with pytest.raises(ValueError, match="validation batch 0 differs between rank 0 and rank 1"):
        check.check("validation", different, group, device)
    check.restart()
    with pytest.raises(ValueError, match="training batch 0"):
        check.check("training", different, group, device)
