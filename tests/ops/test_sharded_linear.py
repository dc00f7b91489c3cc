"""sharded_linear: each rank's own input times a weight that is sharded over the group."""

from __future__ import annotations

import io

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import weft
from ops.collectives.profiled import collectives_of
from ops.memory.counting import counted
from ops.operators import autocast, chunk
from support.ranks import on_ranks

TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 3e-2, "float16": 6e-3}


def _group() -> str:
    return dist.group.WORLD.group_name


def _close(actual: Tensor, expected: Tensor, dtype: str, label: str) -> None:
    assert actual.shape == expected.shape and actual.is_contiguous(), label
    bound = TOLERANCE[dtype] * max(1.0, expected.abs().max().item() if expected.numel() else 0.0)
    error = (actual.double() - expected.double()).abs().max().item() if expected.numel() else 0.0
    assert error <= bound, f"{label}: {error:.2e} > {bound:.2e}"


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_values_and_gradients(rank: int, world_size: int, dtype: str) -> None:
    torch_dtype = getattr(torch, dtype)
    for group in (_group(), dist.new_group(backend="gloo").group_name):
        # Weight rows: even, uneven, empty on some ranks, empty on all. Tokens: different numbers per rank, and none.
        for rows, shape in [(8, (2, 3 + rank, 5)), (7, (4, 5)), (2, (5,)), (0, (3, 5)), (6, (0, 5)), (6, (2, 0))]:
            torch.manual_seed(1)
            weight, bias = torch.randn(rows, shape[-1]) * 0.5, torch.randn(rows)
            weight, bias = (tensor.to(torch_dtype).double().requires_grad_() for tensor in (weight, bias))
            torch.manual_seed(100 + rank)
            x = torch.randn(shape).to(torch_dtype).double().requires_grad_()
            y = F.linear(x, weight, bias)
            grad = torch.randn(y.shape).to(torch_dtype).double()
            y.backward(grad)
            for tensor in (weight, bias):
                dist.all_reduce(tensor.grad)

            local_x = x.detach().to(torch_dtype).requires_grad_()
            leaves = [chunk(tensor.to(torch_dtype), 0, world_size, rank) for tensor in (weight, bias)]
            out = weft.ops.sharded_linear(local_x, *leaves, group_name=group, out_features=rows)
            _close(out, y, dtype, "y")
            out.backward(grad.to(torch_dtype))
            _close(local_x.grad, x.grad, dtype, "grad x")
            for leaf, full in zip(leaves, (weight, bias), strict=True):
                _close(leaf.grad, chunk(full.grad, 0, world_size, rank), dtype, f"grad {leaf.shape}")


@on_ranks(2, 4)
def test_number_of_collectives(rank: int, world_size: int) -> None:
    x = torch.ones(3, 5, requires_grad=True)
    weight, bias = torch.ones(2, 5, requires_grad=True), torch.ones(2, requires_grad=True)

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return weft.ops.sharded_linear(x, weight, bias, group_name=_group())

    y = collectives_of(lambda: linear(x, weight), expected={"broadcast": world_size})
    collectives_of(y.sum().backward, expected={"broadcast": world_size, "reduce": world_size})
    y = collectives_of(lambda: linear(x, weight, bias), {"broadcast": world_size, "all_gather_into_tensor": 1})
    expected = {"broadcast": world_size, "reduce": world_size, "reduce_scatter_tensor": 1}
    collectives_of(y.sum().backward, expected)
    collectives_of(linear(x.detach(), weight).sum().backward, expected={"reduce": world_size})
    collectives_of(linear(x, weight.detach()).sum().backward, expected={"broadcast": world_size})


@on_ranks(4)
def test_at_most_two_remote_shards_exist(rank: int, world_size: int) -> None:
    """Forward and backward hold at most two shards of other ranks; a call saves only x and this rank's shard."""
    x, weight = torch.randn(8, 64, requires_grad=True), torch.randn(32, 64, requires_grad=True)
    shard = weight.nbytes
    with counted() as count:
        y = weft.ops.sharded_linear(x, weight, group_name=_group())
        staging = count.now("communication")
        assert count.now() - staging == y.nbytes
        assert count.peak() - staging <= y.nbytes + 2 * shard
        grad = torch.ones_like(y)
        weft.memory.reset_peak()
        y.backward(grad)
        allocated = y.nbytes + grad.nbytes + x.grad.nbytes + weight.grad.nbytes
        staging = count.now("communication")
        assert count.now() - staging == allocated
        assert count.peak() - staging <= allocated + 2 * shard


@on_ranks(2)
def test_errors_leave_group_usable(rank: int) -> None:
    x, weight = torch.ones(3, 4), torch.ones(5, 4)
    text = rf"weft::sharded_linear: got weight of shape \[5, 4\] on rank {rank} of 2 with out_features 14"
    with pytest.raises(ValueError, match=text):
        weft.ops.sharded_linear(x, weight, group_name=_group(), out_features=14)
    with pytest.raises(ValueError, match="whose second dim must be 4"):
        weft.ops.sharded_linear(x, weight.t(), group_name=_group())
    with pytest.raises(TypeError, match="got bias of dtype Double with x of dtype Float"):
        weft.ops.sharded_linear(x, weight, torch.ones(5).double(), group_name=_group())
    assert torch.equal(weft.ops.sharded_linear(x, weight, group_name=_group()), torch.full((3, 10), 4.0))


@on_ranks(1, 2, timeout=300)
def test_compile_export_script_and_autocast(rank: int) -> None:
    torch.manual_seed(rank)
    linear = weft.nn.ShardedLinear(6, 7, group_name=_group())

    def run(module: torch.nn.Module, tokens: int) -> list[Tensor]:
        linear.zero_grad(set_to_none=True)
        x = torch.arange(tokens * 12.0).reshape(2, tokens, 6).sin().requires_grad_()
        y = module(x)
        y.square().sum().backward()
        return [y.detach(), x.grad, *(p.grad.clone() for p in linear.parameters())]

    eager = {tokens: run(linear, tokens) for tokens in (3, 5)}
    torch._dynamo.reset()
    for dynamic in (False, True):
        compiled = torch.compile(linear, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        for tokens in eager if dynamic else (3,):
            torch.testing.assert_close(run(compiled, tokens), eager[tokens])
    program = torch.export.export(linear, (torch.ones(2, 4, 6),), dynamic_shapes=({1: torch.export.Dim("s", min=2)},))
    assert [str(node.target) for node in program.graph.nodes].count("weft.sharded_linear.default") == 1
    torch.testing.assert_close(program.module()(torch.ones(2, 5, 6)), linear(torch.ones(2, 5, 6)))
    scripted = torch.jit.script(linear)
    for _ in range(3):
        torch.testing.assert_close(run(scripted, 3), eager[3])
    buffer = io.BytesIO()
    torch.jit.save(scripted, buffer)
    buffer.seek(0)
    loaded = torch.jit.load(buffer)
    assert weft.nn.rebind_group(loaded, dist.new_group().group_name) == 1
    torch.testing.assert_close(loaded(torch.ones(2, 3, 6)), linear(torch.ones(2, 3, 6)))
    with autocast(torch.bfloat16):
        y = linear(torch.ones(2, 3, 6))
    assert y.dtype is torch.bfloat16
    torch.testing.assert_close(y.float(), linear(torch.ones(2, 3, 6)), rtol=0.05, atol=0.05)
