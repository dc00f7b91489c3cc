"""The operators under torch.compile, torch.export and torch.jit give the eager results, on 2 ranks too."""

from __future__ import annotations

import io

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import weft
from ops.operators import autocast
from support.ranks import on_ranks


class Block(nn.Module):
    """Embedding, column and row linear, the fused MLP, and a conjugate pair."""

    def __init__(self, group_name: str) -> None:
        super().__init__()
        self.group_name = group_name
        self.embed = weft.nn.VocabParallelEmbedding(11, 8, group_name=group_name)
        self.column = weft.nn.ColumnLinear(8, 6, group_name=group_name)
        self.row = weft.nn.RowLinear(6, 8, group_name=group_name)
        self.gated = weft.nn.ColumnRowMLP(8, 10, bias=True, group_name=group_name)
        self.plain = weft.nn.ColumnRowMLP(8, 10, gated=False, activation="gelu", recompute=True, group_name=group_name)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.row(torch.relu(self.column(x)))
        x = x + self.gated(x)
        x = x + self.plain(x)
        return torch.ops.weft.reduce_from_group(torch.ops.weft.copy_to_group(x, self.group_name), self.group_name)


def _block() -> tuple[Block, Tensor]:
    torch.manual_seed(dist.get_rank())
    return Block(dist.group.WORLD.group_name), torch.tensor([[0, 5, 10], [3, 3, 7]])


def _run(module: nn.Module, ids: Tensor) -> list[Tensor]:
    """Return the output and all gradients."""
    module.zero_grad(set_to_none=True)
    y = module(ids)
    y.square().sum().backward()
    return [y.detach(), *(p.grad.clone() for p in module.parameters())]


@on_ranks(1, 2, timeout=300)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_block_matches_eager(backend: str) -> None:
    block, ids = _block()
    eager = _run(block, ids)
    torch._dynamo.reset()
    compiled = _run(torch.compile(block, fullgraph=True, backend=backend), ids)
    for a, b in zip(compiled, eager, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(block, fullgraph=True, backend=backend)(ids), eager[0])


@on_ranks(2, timeout=300)
def test_compiled_mlp_with_dynamic_shapes_matches_eager() -> None:
    mlp = weft.nn.ColumnRowMLP(8, 10, group_name=dist.group.WORLD.group_name)
    torch._dynamo.reset()
    compiled = torch.compile(mlp, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (3, 5, 9):
        x = torch.ones(2, tokens, 8)
        torch.testing.assert_close(compiled(x), mlp(x))


@on_ranks(2, timeout=300)
def test_exported_block_matches_eager() -> None:
    block, ids = _block()
    program = torch.export.export(block, (ids,))
    targets = [str(node.target) for node in program.graph.nodes]
    assert targets.count("weft.column_row_mlp.default") == 2
    torch.testing.assert_close(program.module()(ids), block(ids))
    torch.testing.assert_close(program.run_decompositions().module()(ids), block(ids))


@on_ranks(1, 2)
def test_scripted_block_matches_eager_and_loads(world_size: int) -> None:
    block, ids = _block()
    scripted = torch.jit.script(block)
    eager = _run(block, ids)
    for _ in range(3):  # the profiling executor specializes after two runs
        for a, b in zip(_run(scripted, ids), eager, strict=True):
            torch.testing.assert_close(a, b)
    buffer = io.BytesIO()
    torch.jit.save(scripted, buffer)
    buffer.seek(0)
    loaded = torch.jit.load(buffer)
    assert weft.nn.rebind_group(loaded, dist.new_group().group_name) == 6
    torch.testing.assert_close(loaded(ids), eager[0])


def test_rebind_group_without_weft_modules_raises() -> None:
    with pytest.raises(ValueError, match="got a Linear with no weft module inside"):
        weft.nn.rebind_group(nn.Linear(2, 2), "")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_runs_in_its_dtype(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    mlp = weft.nn.ColumnRowMLP(8, 10, bias=True, group_name="")
    column, row = weft.nn.ColumnLinear(8, 6, group_name=""), weft.nn.RowLinear(6, 8, group_name="")
    x = torch.randn(3, 8, requires_grad=True)
    exact = row(column(mlp(x)))
    with autocast(dtype):
        y = mlp(x)
        assert y.dtype is dtype
        y = row(column(y))
    assert y.dtype is dtype
    y.float().sum().backward()
    assert mlp.w1.grad.dtype is torch.float32
    torch.testing.assert_close(y.float(), exact, rtol=0.05, atol=0.05)
