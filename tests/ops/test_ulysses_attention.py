"""Ulysses attention, alone and with a ring: values, gradients, collectives, tracing, errors."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import weft
from ops.collectives.profiled import collectives_of
from ops.operators import autocast
from ops.sequence_attention import Reference, Shape, check_compiled, computed_pairs, messages_of, tokens_of
from support.ranks import on_ranks
from weft.strategy.context.groups import Grid, grids_of

# Even and uneven shards; key/value heads that the ranks divide, that divide the ranks, and neither; no tokens.
SHAPES = (
    Shape(2, 12, 12, 24, 8),
    Shape(1, 12, 4, 37, 6),
    Shape(2, 12, 1, 10, 5),
    Shape(1, 12, 6, 3, 4),
    Shape(1, 12, 2, 0, 4),
)


def _group() -> str:
    return dist.group.WORLD.group_name


@on_ranks(1, 2, 3, 4)
def test_matches_unsharded_attention(rank: int, world_size: int) -> None:
    gloo = dist.new_group(backend="gloo").group_name
    for index, shape in enumerate(SHAPES):
        tokens = tokens_of(shape.tokens, world_size, rank, "contiguous")
        for is_causal in (False, True):
            reference = Reference(shape, is_causal=is_causal, scale=0.4)
            local = reference.local(tokens)
            group = _group() if index else gloo
            options = {"is_causal": is_causal, "scale": 0.4, "sequence_size": shape.tokens}
            out = weft.ops.ulysses_attention(**local, group_name=group, **options)
            reference.check(out, local, tokens, 1e-10)


@on_ranks(1, 2, 3, 4)
def test_windows_and_documents_match_unsharded_attention(rank: int, world_size: int) -> None:
    offsets = torch.tensor([0, 5, 20])
    for shape in SHAPES[:2]:
        tokens = tokens_of(shape.tokens, world_size, rank, "contiguous")
        for mask in (
            {"is_causal": True, "window": 7},
            {"is_causal": True, "document_offsets": offsets},
            {"is_causal": False, "document_offsets": offsets},
            {"is_causal": True, "window": 7, "document_offsets": offsets},
        ):
            reference = Reference(shape, **mask)
            local = reference.local(tokens)
            out = weft.ops.ulysses_attention(**local, group_name=_group(), sequence_size=shape.tokens, **mask)
            reference.check(out, local, tokens, 1e-10)


def _in_grid(grid: Grid, local: dict[str, Tensor], size: int | None, **options: object) -> Tensor:
    groups = {"group_name": grid.ulysses_group_name, "ring_group_name": grid.ring_group_name}
    return weft.ops.ulysses_attention(**local, **groups, sequence_size=size, **options)


OFFSETS = torch.tensor([0, 5, 20])
MASKS = (
    {"is_causal": True},
    {"is_causal": False},
    {"is_causal": True, "window": 7},
    {"is_causal": True, "document_offsets": OFFSETS},
    {"is_causal": False, "document_offsets": OFFSETS},
    {"is_causal": True, "window": 7, "document_offsets": OFFSETS},
)


@on_ranks(3, 4)
def test_grids_match_unsharded_attention(rank: int, world_size: int) -> None:
    """All sizes of the groups and of the rings, in both orders, with even and uneven shards."""
    grids = grids_of(dist.group.WORLD)
    assert [each.num_ulysses for each in grids] == [n for n in range(world_size, 0, -1) if world_size % n == 0]
    for shape, mask in [*product(SHAPES, MASKS[:2]), *product(SHAPES[1:2], MASKS[2:])]:
        reference = Reference(shape, scale=0.4, **mask)
        for grid, order in product(grids, ("head_tail", "contiguous")):
            tokens = tokens_of(shape.tokens, world_size, rank, order)
            local = reference.local(tokens)
            reference.check(_in_grid(grid, local, shape.tokens, scale=0.4, order=order, **mask), local, tokens, 1e-10)


@on_ranks(4)
def test_rows_of_a_grid_have_their_own_documents(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    full = {name: torch.randn(2, 2, 13, 4, dtype=torch.float64) for name in ("query", "key", "value")}
    offsets, tokens = torch.tensor([[4, 9], [0, 13]], dtype=torch.int32), tokens_of(13, world_size, rank, "head_tail")
    local = {name: each[:, :, tokens] for name, each in full.items()}
    for grid, is_causal in product(grids_of(dist.group.WORLD)[1:], (False, True)):
        options = {"document_offsets": offsets, "is_causal": is_causal}
        expected = weft.ops.ring_attention(**full, group_name="", **options)[:, :, tokens]
        torch.testing.assert_close(_in_grid(grid, local, 13, order="head_tail", **options), expected)


@on_ranks(4)
def test_grid_has_fewer_messages_than_a_ring(rank: int) -> None:
    """2 x 2 ranks: messages of a ring have as many bytes on 2 ranks as on 4."""
    local = {name: torch.randn(1, 4, 8, 2, requires_grad=True) for name in ("query", "key", "value")}
    grid = grids_of(dist.group.WORLD)[1]
    run = partial(_in_grid, grid, local, 32, is_causal=True, order="head_tail")
    shard = 4 * 8 * 2 * 4  # bytes of all heads and of a rank's tokens
    messages = Counter({("send", 2 * shard): 1, ("recv", 2 * shard): 1})
    forward, out = messages_of(run)
    assert forward == messages + Counter({("all_to_all", 3 * shard): 1, ("all_to_all", shard): 1})
    backward, _ = messages_of(out.sum().backward)
    assert backward == messages + messages + Counter({("all_to_all", 3 * shard): 1, ("all_to_all", shard): 1})


@on_ranks(4)
def test_ranks_of_a_grid_have_equal_work(rank: int) -> None:
    """In head-tail order: its own block, of 16 tokens, and half of the other one of the ring of two."""
    local = {name: torch.randn(1, 2, 8, 4) for name in ("query", "key", "value")}
    grid = grids_of(dist.group.WORLD)[1]
    pairs = {
        order: computed_pairs(partial(_in_grid, grid, local, 32, is_causal=True, order=order))
        for order in ("head_tail", "contiguous")
    }
    assert pairs == {"head_tail": 16 * 16 + 16 * 8, "contiguous": 16 * 16 * (1 + rank // 2)}


@on_ranks(2)
def test_number_of_collectives(rank: int) -> None:
    local = {name: torch.randn(1, 4, 6, 2, requires_grad=True) for name in ("query", "key", "value")}
    out = collectives_of(
        lambda: weft.ops.ulysses_attention(**local, group_name=_group()), expected={"all_to_all_single": 2}
    )
    collectives_of(lambda: out.sum().backward(), expected={"all_to_all_single": 2})


class Block(nn.Module):
    """Self-attention on a shard of a sequence."""

    def __init__(self, group_name: str, order: str = "contiguous", ring_group_name: str = "") -> None:
        super().__init__()
        self.qkv = nn.Linear(6, 24)
        self.group_name = group_name
        self.order = order
        self.ring_group_name = ring_group_name

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (12, 2)).transpose(1, 2).chunk(3, 1)
        out = torch.ops.weft.ulysses_attention(
            query,
            key,
            value,
            group_name=self.group_name,
            is_causal=True,
            order=self.order,
            ring_group_name=self.ring_group_name,
        )
        return out.transpose(1, 2).flatten(2)


@on_ranks(2, timeout=300)
def test_compile_export_script_and_autocast(rank: int) -> None:
    torch.manual_seed(3)
    block = Block(_group())
    inputs = {tokens: torch.randn(2, tokens, 6) + rank for tokens in (4, 5)}
    eager = check_compiled(block, inputs)
    program = torch.export.export(block, (inputs[4],))
    torch.testing.assert_close(program.run_decompositions().module()(inputs[4]), eager[4][0])
    torch.testing.assert_close(torch.jit.script(block)(inputs[5]), eager[5][0])
    tensors = [torch.randn(1, 2, 4, 2) for _ in range(3)]
    with autocast(torch.bfloat16):
        assert weft.ops.ulysses_attention(*tensors, group_name=_group()).dtype is torch.bfloat16


@on_ranks(4, timeout=300)
def test_export_and_script_grid(rank: int) -> None:
    torch.manual_seed(3)
    grid = grids_of(dist.group.WORLD)[1]
    block = Block(grid.ulysses_group_name, "head_tail", grid.ring_group_name)
    x = torch.randn(2, 4, 6) + rank
    expected = block(x)
    torch.testing.assert_close(torch.export.export(block, (x,)).run_decompositions().module()(x), expected)
    torch.testing.assert_close(torch.jit.script(block)(x), expected)


def _check_offsets_out_of_order(x: Tensor) -> None:
    with pytest.raises(ValueError, match=r"weft::ulysses_attention: got document_offsets \[2, 1\] for a sequence of"):
        weft.ops.ulysses_attention(x, x, x, group_name=_group(), document_offsets=torch.tensor([2, 1]))


@on_ranks(2, 4)
def test_errors_leave_group_usable(rank: int, world_size: int) -> None:
    x, odd = torch.ones(2, 4, 6, 8), torch.ones(2, 3, 6, 8)
    with pytest.raises(
        ValueError, match=rf"weft::ulysses_attention: got 3 query heads on {world_size} ranks; pass a mul"
    ):
        weft.ops.ulysses_attention(odd, odd, odd, group_name=_group())
    with pytest.raises(ValueError, match="got 4 query heads with 3 heads of key and 3 of value"):
        weft.ops.ulysses_attention(x, odd, odd, group_name=_group())
    with pytest.raises(
        ValueError, match=rf"got query of shape \[2, 4, 6, 8\] on rank {rank} of {world_size} with sequ"
    ):
        weft.ops.ulysses_attention(x, x, x, group_name=_group(), sequence_size=100)
    with pytest.raises(TypeError, match="got key of dtype Double with query of dtype Float"):
        weft.ops.ulysses_attention(x, x.double(), x, group_name=_group())
    with pytest.raises(ValueError, match="weft::ulysses_attention: got window 2 with is_causal false; pass"):
        weft.ops.ulysses_attention(x, x, x, group_name=_group(), window=2)
    with pytest.raises(ValueError, match=r"weft::ulysses_attention: got order 'striped'; pass 'head_tail' or 'cont"):
        weft.ops.ulysses_attention(x, x, x, group_name=_group(), order="striped")
    with pytest.raises(
        ValueError, match=rf"on rank {rank} of {world_size} with sequence_size 50 of dim 2 in head_tail"
    ):
        _in_grid(grids_of(dist.group.WORLD)[-1], {"query": x, "key": x, "value": x}, 50, order="head_tail")
    collectives_of(partial(_check_offsets_out_of_order, x), expected={})
    torch.testing.assert_close(weft.ops.ulysses_attention(x, x, x, group_name=_group()), x)
