"""Column and row linears in sequence parallelism: values, gradients, communication, saved bytes, errors."""

from __future__ import annotations

import io
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import weft
from ops.collectives.profiled import collectives_of
from ops.memory.counting import counted
from ops.operators import autocast, chunk
from ops.overlapping import overlapping
from support.ranks import on_ranks

TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 3e-2, "float16": 4e-3}
GATHER, SCATTER = {"all_gather_into_tensor": 1}, {"reduce_scatter_tensor": 1}
# (shape of the unsharded input, sequence dim): even, uneven, empty on some ranks, empty on all.
INPUTS = [((8, 5), 0), ((2, 7, 5), 1), ((7, 2, 5), 0), ((1, 5), -2), ((0, 5), 0)]


def _group() -> str:
    return dist.group.WORLD.group_name


def _close(actual: Tensor, expected: Tensor, dtype: str, label: str) -> None:
    assert actual.shape == expected.shape, label
    bound = TOLERANCE[dtype] * max(1.0, expected.abs().max().item() if expected.numel() else 0.0)
    error = (actual.double() - expected.double()).abs().max().item() if expected.numel() else 0.0
    assert error <= bound, f"{label}: {error:.2e} > {bound:.2e}"


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("overlap", ["never", "always"])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_values_and_gradients(rank: int, world_size: int, dtype: str, overlap: weft.overlap.Mode) -> None:
    with overlapping(overlap):
        _check_values_and_gradients(rank, world_size, dtype)


def _check_values_and_gradients(rank: int, world_size: int, dtype: str) -> None:
    torch_dtype = getattr(torch, dtype)

    def local_shard(tensor: Tensor, dim: int) -> Tensor:
        return chunk(tensor.to(torch_dtype), dim, world_size, rank)

    for shape, dim in INPUTS:
        for rows in (8, 3):  # 3: uneven, and empty on one of 4 ranks
            torch.manual_seed(1)
            values = (torch.randn(shape), torch.randn(rows, 5) * 0.5, torch.randn(rows))
            x, weight, bias = (tensor.to(torch_dtype).double().requires_grad_() for tensor in values)
            y = F.linear(x, weight, bias)
            grad = torch.randn(y.shape).to(torch_dtype).double()
            y.backward(grad)

            leaves = local_shard(x, dim), local_shard(weight, 0), local_shard(bias, 0)
            out = weft.ops.all_gather_linear(*leaves, gather_dim=dim, group_name=_group(), dim_size=shape[dim])
            _close(out, chunk(y, -1, world_size, rank), dtype, "gathered y")
            out.backward(local_shard(grad, -1))
            for leaf, full, shard_dim in zip(leaves, (x, weight, bias), (dim, 0, 0), strict=True):
                _close(leaf.grad, chunk(full.grad, shard_dim, world_size, rank), dtype, f"gathered grad, {leaf.shape}")

            # The features of x [..., 5] and the columns of the weight [rows, 5] are sharded.
            x.grad = weight.grad = bias.grad = None
            y = F.linear(x, weight, bias)
            y.backward(grad)
            leaves = local_shard(x, -1), local_shard(weight, 1), bias.detach().to(torch_dtype).requires_grad_()
            out = weft.ops.linear_reduce_scatter(*leaves, scatter_dim=dim, group_name=_group())
            _close(out, chunk(y, dim, world_size, rank), dtype, "scattered y")
            out.backward(local_shard(grad, dim))
            _close(leaves[0].grad, chunk(x.grad, -1, world_size, rank), dtype, "scattered grad x")
            _close(leaves[1].grad, chunk(weight.grad, 1, world_size, rank), dtype, "scattered grad weight")
            _close(leaves[2].grad, bias.grad, dtype, "scattered grad bias")


@on_ranks(2)
def test_number_of_collectives(rank: int) -> None:
    x = torch.ones(4, 3, 5, requires_grad=True)
    weight, bias = torch.ones(6, 5, requires_grad=True), torch.ones(6, requires_grad=True)

    def gathered(x: Tensor, weight: Tensor) -> Tensor:
        return weft.ops.all_gather_linear(x, weight, bias, gather_dim=0, group_name=_group())

    def scattered() -> Tensor:
        return weft.ops.linear_reduce_scatter(x, weight, bias, scatter_dim=1, group_name=_group())

    y = collectives_of(lambda: gathered(x, weight), expected=GATHER)
    collectives_of(lambda: y.sum().backward(), expected=GATHER | SCATTER)
    y = gathered(x.detach(), weight)
    collectives_of(lambda: y.sum().backward(), expected=GATHER)
    y = gathered(x, weight.detach())
    collectives_of(lambda: y.sum().backward(), expected=SCATTER)
    y = collectives_of(scattered, expected=SCATTER)
    collectives_of(lambda: y.sum().backward(), expected=GATHER)


@on_ranks(2)
def test_saved_bytes(rank: int) -> None:
    """The gathered input is freed: a call saves only the shard of x, which the caller references anyway."""
    x, weight = torch.randn(64, 32, requires_grad=True), torch.randn(16, 32, requires_grad=True)
    with counted() as count:
        y = weft.ops.all_gather_linear(x, weight, gather_dim=0, group_name=_group())
        staging = count.now("communication")
        assert count.now() - staging == y.nbytes == 128 * 16 * 4
        assert count.peak() - staging == y.nbytes + 2 * x.nbytes  # the gathered input


@on_ranks(2)
def test_errors_leave_group_usable(rank: int) -> None:
    x, weight = torch.ones(3, 4), torch.ones(5, 4)
    with pytest.raises(ValueError, match=r"weft::all_gather_linear: got gather_dim 1, the last dim of x"):
        weft.ops.all_gather_linear(x, weight, gather_dim=-1, group_name=_group())
    with pytest.raises(IndexError, match="weft::linear_reduce_scatter: got scatter_dim 2 for x with 2 dims"):
        weft.ops.linear_reduce_scatter(x, weight, scatter_dim=2, group_name=_group())
    with pytest.raises(ValueError, match=rf"got x of shape \[3, 4\] on rank {rank} of 2 with dim_size 9 of dim 0"):
        weft.ops.all_gather_linear(x, weight, gather_dim=0, group_name=_group(), dim_size=9)
    with pytest.raises(ValueError, match="whose second dim must be 4"):
        weft.ops.linear_reduce_scatter(x, weight.t(), scatter_dim=0, group_name=_group())
    with pytest.raises(TypeError, match="got weight of dtype Double with x of dtype Float"):
        weft.ops.all_gather_linear(x, weight.double(), gather_dim=0, group_name=_group())
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2


class Block(nn.Module):
    """A feed-forward block on a shard of the sequence."""

    def __init__(self, group_name: str) -> None:
        super().__init__()
        self.up = weft.nn.AllGatherLinear(6, 10, gather_dim=1, group_name=group_name)
        self.down = weft.nn.LinearReduceScatter(10, 6, scatter_dim=1, group_name=group_name)

    def forward(self, x: Tensor, dim_size: int | None = None) -> Tensor:
        return self.down(torch.relu(self.up(x, dim_size)))


def _run(module: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    module.zero_grad(set_to_none=True)
    y = module(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in module.parameters())]


class AllLayers(nn.Module):
    """A model in whose backward, above all, collectives do not depend on each other's results."""

    def __init__(self, group_name: str) -> None:
        super().__init__()
        self.block = Block(group_name)
        self.mlp = weft.nn.ColumnRowMLP(6, 10, bias=True, sequence_dim=1, group_name=group_name)
        self.sharded = weft.nn.ShardedLinear(6, 6, group_name=group_name)
        self.loss = weft.nn.VocabParallelLinearCrossEntropy(6, 11, group_name=group_name)
        self.group_name = group_name

    def forward(self, x: Tensor) -> Tensor:
        x = self.sharded(self.mlp(self.block(x, 5), 5))
        x = torch.ops.weft.gather_from_sequence(x, 1, self.group_name, dim_size=5)
        return self.loss(x, torch.arange(10, device=x.device).view(2, 5))


@on_ranks(2, timeout=300)
def test_inductor_on_uneven_shards(rank: int) -> None:
    """Ranks with graphs of different sizes call their collectives in the same order."""
    torch.manual_seed(rank)
    model = AllLayers(_group())
    x = torch.ones(2, 3 - rank, 6)
    eager = _run(model, x)
    torch._dynamo.reset()
    for ours, expected in zip(_run(torch.compile(model, fullgraph=True), x), eager, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_dispatch_mode_on_one_rank(rank: int) -> None:
    """One rank traces its backward; the other does not."""
    x, weight = torch.ones(3, 5, requires_grad=True), torch.ones(6, 5, requires_grad=True)
    y = weft.ops.all_gather_linear(x, weight, gather_dim=0, group_name=_group()).sin()
    with FlopCounterMode(display=False) if rank == 0 else nullcontext():
        y.sum().backward()
    expected = torch.full((6,), 5.0).cos().sum() * 2
    torch.testing.assert_close(x.grad, expected.expand(3, 5))


@on_ranks(1, 2, timeout=300)
def test_compile_export_script_and_autocast(rank: int) -> None:
    torch.manual_seed(rank)
    block = Block(_group())
    eager = {tokens: _run(block, torch.ones(2, tokens, 6)) for tokens in (3, 5)}
    torch._dynamo.reset()
    for dynamic in (False, True):
        compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        for tokens in eager if dynamic else (3,):
            torch.testing.assert_close(_run(compiled, torch.ones(2, tokens, 6)), eager[tokens])
    program = torch.export.export(block, (torch.ones(2, 4, 6),), dynamic_shapes=({1: torch.export.Dim("s", min=2)},))
    targets = [str(node.target) for node in program.graph.nodes]
    assert targets.count("weft.all_gather_linear.default") == targets.count("weft.linear_reduce_scatter.default") == 1
    torch.testing.assert_close(program.module()(torch.ones(2, 5, 6)), block(torch.ones(2, 5, 6)))

    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(block), buffer)
    buffer.seek(0)
    loaded = torch.jit.load(buffer)
    assert weft.nn.rebind_group(loaded, dist.new_group().group_name) == 2
    for _ in range(3):
        torch.testing.assert_close(_run(loaded, torch.ones(2, 3, 6)), eager[3])

    with autocast(torch.bfloat16):
        y = block(torch.ones(2, 3, 6))
    assert y.dtype is torch.bfloat16
    torch.testing.assert_close(y.float(), eager[3][0], rtol=0.05, atol=0.05)
