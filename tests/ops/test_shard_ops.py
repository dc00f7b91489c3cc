"""The conjugate pairs of operators that shard tensors over a group: values, gradients, communication, errors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import weft
from ops.collectives.profiled import collectives_of
from ops.operators import chunk
from support.ranks import on_ranks

DTYPES = ("float64", "float32", "bfloat16")
TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 2e-2}
# (shape of the unsharded tensor, dim): even, uneven, empty on some ranks, empty on all.
SHARDINGS = [((12, 3), 0), ((2, 12, 3), 1), ((2, 7, 3), 1), ((3, 5), -1), ((1, 4), 0), ((0, 4), 0), ((5, 0), 0)]


def _rank_values(rank: int, shape: tuple[int, ...], dtype: str) -> Tensor:
    """Return a rank's values, which every rank can compute."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(rank)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    return values.to(getattr(torch, dtype))


def _sum(world_size: int, shape: tuple[int, ...], dtype: str) -> Tensor:
    return sum((_rank_values(each, shape, dtype).double() for each in range(world_size)), torch.zeros(shape).double())


def _close(actual: Tensor, expected: Tensor, dtype: str) -> None:
    assert actual.dtype is getattr(torch, dtype) and actual.is_contiguous() and actual.shape == expected.shape
    torch.testing.assert_close(actual.double(), expected.double(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def _groups() -> list[str]:
    """Return a weft group and a gloo group; gloo cannot gather shards of different sizes."""
    return [dist.group.WORLD.group_name, dist.new_group(backend="gloo").group_name]


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_gradients(rank: int, world_size: int, dtype: str) -> None:
    for group in _groups():
        for shape, dim in SHARDINGS:
            size = shape[dim]
            full, full_grad = _rank_values(100, shape, dtype), _rank_values(7, shape, dtype)  # equal on all ranks
            local_values, total = _rank_values(rank, shape, dtype), _sum(world_size, shape, dtype)
            shard = partial(chunk, dim=dim, world_size=world_size, rank=rank)

            x = full.clone().requires_grad_()
            y = weft.ops.scatter_to_group(x, dim, group)
            assert torch.equal(y, shard(full))
            y.backward(shard(full_grad))
            assert torch.equal(x.grad, full_grad)

            x = shard(full)
            y = weft.ops.gather_from_group(x, dim, group, dim_size=size)
            assert torch.equal(y, full)
            y.backward(full_grad)
            assert torch.equal(x.grad, shard(full_grad))

            x = shard(full)
            y = weft.ops.gather_from_sequence(x, dim, group, dim_size=size)
            assert torch.equal(y, full)
            y.backward(local_values)
            _close(x.grad, shard(total), dtype)

            x = local_values.clone().requires_grad_()
            y = weft.ops.reduce_scatter_to_sequence(x, dim, group)
            _close(y, shard(total), dtype)
            y.backward(shard(full_grad))
            assert torch.equal(x.grad, full_grad)


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_to_all_swaps_dims(rank: int, world_size: int, dtype: str) -> None:
    """A tensor that is full along one dim and sharded along another is returned with the two dims swapped."""
    for group in _groups():
        for shape, full_dim, sharded_dim in [((6, 5, 2), 0, 1), ((3, 2, 7), -1, 0), ((1, 3), 1, 0), ((4, 0), 0, 1)]:
            tensor = _rank_values(100, shape, dtype)
            x = chunk(tensor.transpose(0, 1).contiguous().transpose(0, 1), sharded_dim, world_size, rank)
            y = weft.ops.all_to_all(x, full_dim, sharded_dim, group, cat_size=shape[sharded_dim])
            assert torch.equal(y, chunk(tensor, full_dim, world_size, rank))
            grad = _rank_values(7, shape, dtype)
            y.backward(chunk(grad, full_dim, world_size, rank))
            assert torch.equal(x.grad, chunk(grad, sharded_dim, world_size, rank))


@on_ranks(2, 4)
def test_omitted_sizes_mean_equal_shards(rank: int, world_size: int) -> None:
    group = dist.group.WORLD.group_name
    x = torch.full((2, 3), float(rank))
    expected = torch.arange(world_size).repeat_interleave(2)[:, None].expand(-1, 3).float()
    assert torch.equal(weft.ops.gather_from_group(x, 0, group), expected)
    assert torch.equal(weft.ops.gather_from_sequence(x, 0, group), expected)
    assert torch.equal(weft.ops.all_to_all(torch.full((1, 4), float(rank)), 1, 0, group)[:, 0], expected[::2, 0])


GATHER, SCATTER, EXCHANGE = {"all_gather_into_tensor": 1}, {"reduce_scatter_tensor": 1}, {"all_to_all_single": 1}
COLLECTIVES = {
    "scatter_to_group": ({}, GATHER),
    "gather_from_group": (GATHER, {}),
    "gather_from_sequence": (GATHER, SCATTER),
    "reduce_scatter_to_sequence": (SCATTER, GATHER),
}


@on_ranks(2)
def test_number_of_collectives(rank: int) -> None:
    group = dist.group.WORLD.group_name
    for name, (forward, backward) in COLLECTIVES.items():
        x = torch.ones(4, 3, requires_grad=True)
        y = collectives_of(partial(getattr(weft.ops, name), x, 0, group), expected=forward)
        collectives_of(y.sum().backward, expected=backward)
    x = torch.ones(4, 3, requires_grad=True)
    y = collectives_of(partial(weft.ops.all_to_all, x, 0, 1, group), expected=EXCHANGE)
    collectives_of(y.sum().backward, expected=EXCHANGE)


@on_ranks(2)
def test_even_shards_are_copied_once(rank: int) -> None:
    """A gather copies its result, a reduce-scatter its input; neither copies if the sharded dim is the first."""
    group = dist.group.WORLD.group_name
    for name in ("gather_from_group", "reduce_scatter_to_sequence"):
        for dim, num_copies in ((0, 0), (1, 1), (2, 1)):
            x = torch.ones(2, 4, 6)
            with profile(activities=[ProfilerActivity.CPU]) as profiler:
                getattr(weft.ops, name)(x, dim, group)
            copies = [event for event in profiler.events() if event.name == "aten::copy_"]
            assert len(copies) == num_copies, (name, dim)


@on_ranks(2)
def test_errors_leave_group_usable(rank: int) -> None:
    group = dist.group.WORLD.group_name
    x = torch.ones(3, 4)
    with pytest.raises(IndexError, match=r"weft::scatter_to_group: got dim 2 for x with 2 dims; pass one from -2 to 1"):
        weft.ops.scatter_to_group(x, 2, group)
    with pytest.raises(IndexError, match="got dim 0 for x with 0 dims"):
        weft.ops.reduce_scatter_to_sequence(torch.tensor(1.0), 0, group)
    with pytest.raises(ValueError, match=rf"got x of shape \[3, 4\] on rank {rank} of 2 with dim_size 8 of dim 0"):
        weft.ops.gather_from_sequence(x, 0, group, dim_size=8)
    with pytest.raises(ValueError, match="with cat_size -1 of dim 1"):
        weft.ops.all_to_all(x, 0, 1, group, cat_size=-1)
    with pytest.raises(ValueError, match="got 1 as split_dim and as cat_dim"):
        weft.ops.all_to_all(x, 1, -1, group)
    with pytest.raises(ValueError, match="no process group of this process"):
        weft.ops.gather_from_group(x, 0, "nowhere")
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2


class Sequence(torch.nn.Module):
    """Calls all pairs of operators in turn, on uneven shards."""

    def __init__(self, group_name: str) -> None:
        super().__init__()
        self.group_name = group_name

    def forward(self, x: Tensor) -> Tensor:
        group = self.group_name
        shard = torch.ops.weft.scatter_to_group(x, 1, group)
        heads = torch.ops.weft.all_to_all(shard, 2, 1, group, cat_size=x.size(1))
        back = torch.ops.weft.all_to_all(heads, 1, 2, group, cat_size=x.size(2))
        full = torch.ops.weft.gather_from_sequence(back * 2, 1, group, dim_size=x.size(1))
        shard = torch.ops.weft.reduce_scatter_to_sequence(full.sin(), 1, group)
        return torch.ops.weft.gather_from_group(shard, 1, group, dim_size=x.size(1))


@on_ranks(1, 2, timeout=300)
def test_compile_export_and_script(rank: int) -> None:
    module = Sequence(dist.group.WORLD.group_name)

    def run(function: Callable[[Tensor], Tensor], tokens: int) -> tuple[Tensor, Tensor]:
        x = torch.arange(tokens * 6.0).reshape(2, tokens, 3).div(10).requires_grad_()
        y = function(x)
        y.square().sum().backward()
        return y.detach(), x.grad

    torch._dynamo.reset()
    for dynamic in (False, True):
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        for tokens in (5, 8) if dynamic else (5,):
            torch.testing.assert_close(run(compiled, tokens), run(module, tokens))
    scripted = torch.jit.script(module)
    for _ in range(3):
        torch.testing.assert_close(run(scripted, 5), run(module, 5))
    x = torch.randn(2, 8, 3, generator=torch.Generator(torch.get_default_device()).manual_seed(0))
    program = torch.export.export(module, (x,), dynamic_shapes=({1: 2 * torch.export.Dim("pairs", min=2, max=32)},))
    for tokens in (6, 10):
        x = torch.randn(2, tokens, 3, generator=torch.Generator(torch.get_default_device()).manual_seed(1))
        torch.testing.assert_close(program.module()(x), module(x))
