"""Ring attention: values, gradients, computed pairs, messages, bytes, memory, tracing, errors."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import weft
from ops.collectives.profiled import collectives_of
from ops.memory.counting import counted
from ops.operators import autocast
from ops.sequence_attention import SHAPES, Reference, Shape, check_compiled, computed_pairs, messages_of, tokens_of
from support.ranks import on_ranks

ORDERS = ("head_tail", "contiguous")
# float64: rounding of sums in another order. Others: rounding to the dtype, of blocks' results too.
TOLERANCE = {"float64": 1e-10, "float32": 2e-5, "bfloat16": 3e-2, "float16": 4e-3}


def _group() -> str:
    return dist.group.WORLD.group_name


def _ring(local: dict[str, Tensor], size: int | None, group: str | None = None, **options: object) -> Tensor:
    name = _group() if group is None else group
    return weft.ops.ring_attention(**local, group_name=name, sequence_size=size, **options)


@on_ranks(1, 2, 3, 4)
def test_matches_unsharded_attention(rank: int, world_size: int) -> None:
    for shape in SHAPES:
        for is_causal in (False, True):
            reference = Reference(shape, is_causal=is_causal)
            for order in ORDERS:
                tokens = tokens_of(shape.tokens, world_size, rank, order)
                local = reference.local(tokens)
                out = _ring(local, shape.tokens, is_causal=is_causal, order=order)
                reference.check(out, local, tokens, TOLERANCE["float64"])


@on_ranks(1, 2, 3, 4)
def test_window_matches_unsharded_attention(rank: int, world_size: int) -> None:
    """Windows within a chunk, of several chunks and of all tokens; and, of 1,210 tokens, of several calls."""
    windows = {37: (1, 2, 5, 13, 37, 100), 10: (1, 3, 7), 3: (2,), 0: (1,), 1210: (1, 90, 130, 700, 1209)}
    for shape in SHAPES:
        for window in windows.get(shape.tokens, ()):
            reference = Reference(shape, is_causal=True, window=window)
            for order in ORDERS:
                tokens = tokens_of(shape.tokens, world_size, rank, order)
                local = reference.local(tokens)
                out = _ring(local, shape.tokens, is_causal=True, order=order, window=window)
                reference.check(out, local, tokens, TOLERANCE["float64"])


# For 37 tokens and for 1,210: one document, cumulative lengths, empty documents, documents of one token, and padding.
DOCUMENTS = {37: ([], [0, 37], [9, 9, 20], [*range(12), 30]), 1210: ([0, 500, 1000], [0, 3, 700, 1210])}


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("is_causal", [False, True])
def test_documents_match_unsharded_attention(rank: int, world_size: int, is_causal: bool) -> None:
    for shape in SHAPES:
        for offsets in DOCUMENTS.get(shape.tokens, ()):
            for window in (None, 6, 300) if is_causal else (None,):
                options = {"document_offsets": torch.tensor(offsets, dtype=torch.int64), "window": window}
                reference = Reference(shape, is_causal=is_causal, **options)
                for order in ORDERS:
                    tokens = tokens_of(shape.tokens, world_size, rank, order)
                    local = reference.local(tokens)
                    out = _ring(local, shape.tokens, is_causal=is_causal, order=order, **options)
                    reference.check(out, local, tokens, TOLERANCE["float64"])


@on_ranks(1, 3)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("first_row", [[0, 4, 9, 24], [0, 24, 24, 24]])
def test_rows_have_their_own_documents(rank: int, world_size: int, first_row: list[int], order: weft.ops.Order) -> None:
    offsets = torch.tensor([first_row, [0, 1, 23, 24]], dtype=torch.int32)
    tokens = tokens_of(24, world_size, rank, order)
    torch.manual_seed(0)
    full = {name: torch.randn(2, 2, 24, 4, dtype=torch.float64) for name in ("query", "key", "value")}
    results = []
    for rows in (slice(0, 2), slice(0, 1), slice(1, 2)):
        local = {name: tensor[rows][:, :, tokens].requires_grad_() for name, tensor in full.items()}
        out = _ring(local, 24, is_causal=True, document_offsets=offsets[rows], order=order)
        (out * torch.arange(1.0, 1.0 + len(tokens))[:, None]).sum().backward()
        results.append([out, *(tensor.grad for tensor in local.values())])
    for both, first, second in zip(*results, strict=True):
        torch.testing.assert_close(both, torch.cat([first, second]), rtol=1e-12, atol=1e-12)


@on_ranks(2)
def test_pairs_of_different_documents_are_not_computed(rank: int) -> None:
    local = {name: torch.randn(1, 1, 16, 4) for name in ("query", "key", "value")}
    offsets = torch.tensor([4, 20])  # contiguous: of rank 0, 4 and 12 tokens; of rank 1, 4 and 12
    run = partial(_ring, local, 32, order="contiguous", document_offsets=offsets)
    assert computed_pairs(run) == (4 * 4 + 12 * 16 if rank == 0 else 4 * 16 + 12 * 12)


def _check_dtypes(rank: int, world_size: int, group: str) -> None:
    shape = SHAPES[1]
    tokens = tokens_of(shape.tokens, world_size, rank, "head_tail")
    for dtype, tolerance in TOLERANCE.items():
        reference = Reference(shape, is_causal=True, scale=0.3, window=9, dtype=getattr(torch, dtype))
        local = reference.local(tokens)
        # Heads behind tokens, as a linear layer makes them; and a last dim with strides.
        strided = {name: tensor.transpose(1, 2).contiguous().transpose(1, 2) for name, tensor in local.items()}
        strided["key"] = torch.stack([local["key"], local["key"]], -1)[..., 0]
        out = _ring(strided, shape.tokens, group, is_causal=True, scale=0.3, window=9)
        reference.check(out, local, tokens, tolerance)


@on_ranks(2, 3)
def test_other_dtypes_scales_and_strides(rank: int, world_size: int) -> None:
    _check_dtypes(rank, world_size, _group())


@on_ranks(2, 3)
def test_gloo(rank: int, world_size: int) -> None:
    _check_dtypes(rank, world_size, dist.new_group(backend="gloo").group_name)


@on_ranks(4)
def test_masked_chunks_are_not_computed(rank: int) -> None:
    """In head-tail order each rank computes half of the other ranks' blocks."""
    local = {name: torch.randn(1, 2, 8, 4) for name in ("query", "key", "value")}
    pairs = {
        order: computed_pairs(lambda order=order: _ring(local, 32, is_causal=True, order=order)) for order in ORDERS
    }
    assert pairs == {"head_tail": 8 * 8 + 3 * 32, "contiguous": 8 * 8 * (rank + 1)}
    assert computed_pairs(lambda: _ring(local, 32)) == 4 * 64


@on_ranks(4)
def test_pairs_outside_of_the_window_are_not_computed(rank: int) -> None:
    """Calls have 128 queries at least, so at most 128 keys more than the window."""
    local = {name: torch.randn(1, 1, 1024, 4) for name in ("query", "key", "value")}
    for order in ORDERS:
        for window in (1, 256, 1000):
            run = partial(_ring, local, 4096, is_causal=True, order=order, window=window)
            pairs, needed = (
                computed_pairs(run),
                sum(min(window, token + 1) for token in tokens_of(4096, 4, rank, order)),
            )
            assert needed <= pairs <= needed + 1024 * (max(128, -(-window // 4)) + 2)
    local = {name: tensor[:, :, :8] for name, tensor in local.items()}
    assert computed_pairs(lambda: _ring(local, 32, is_causal=True, order="contiguous", window=1)) == 8 * 8


@on_ranks(3)
def test_number_and_bytes_of_messages(rank: int, world_size: int) -> None:
    shape = Shape(2, 4, 2, 24, 4)
    tokens = tokens_of(shape.tokens, world_size, rank, "head_tail")
    for dtype, num_bytes in ((torch.float64, 8), (torch.bfloat16, 2)):
        local = Reference(shape, is_causal=True, dtype=dtype).local(tokens)
        blocks = 2 * 2 * 2 * 8 * 4  # key and value of one shard, with two heads
        forward, out = messages_of(partial(_ring, local, None, is_causal=True))
        assert forward == {("send", blocks * num_bytes): 2, ("recv", blocks * num_bytes): 2}
        backward, _ = messages_of(out.sum().backward)
        gradients = blocks * max(num_bytes, 4)  # half precision is summed in float32
        expected = Counter({("send", blocks * num_bytes): 2, ("recv", blocks * num_bytes): 2})
        expected += Counter({("send", gradients): 2, ("recv", gradients): 2})
        assert backward == expected


@on_ranks(4)
@pytest.mark.parametrize(
    ("window", "num_blocks"), [(1, 0), (2, 1), (9, 1), (10, 2), (17, 2), (18, 3), (31, 3), (32, 3)]
)
def test_blocks_move_to_the_ranks_whose_windows_contain_them(window: int, num_blocks: int) -> None:
    local = {name: torch.randn(1, 1, 8, 4, requires_grad=True) for name in ("query", "key", "value")}
    block = 2 * 8 * 4 * 4
    forward, out = messages_of(partial(_ring, local, 32, is_causal=True, order="contiguous", window=window))
    assert forward == Counter({("send", block): num_blocks, ("recv", block): num_blocks})
    backward, _ = messages_of(out.sum().backward)
    assert backward == Counter({("send", block): 2 * num_blocks, ("recv", block): 2 * num_blocks})


@on_ranks(1, 2, 4)
def test_saved_memory_and_peak(world_size: int) -> None:
    shape = Shape(1, 4, 2, 256, 16)
    size = shape.tokens // world_size
    local = {
        name: torch.randn(1, number, size, 16, requires_grad=True)
        for name, number in (("query", 4), ("key", 2), ("value", 2))
    }
    _ring(local, None, is_causal=True).sum().backward()  # allocates the group's shared memory
    with counted() as count:
        out = _ring(local, None, is_causal=True)
        lse_bytes = out.nbytes // shape.head_dim
        assert count.now() - count.now("communication") == out.nbytes + lse_bytes
        # Two results, of the sum and of a block, two blocks, and the buffers of torch's kernel.
        blocks = 4 * local["key"].nbytes if world_size > 1 else 0
        kernel = 4 * (64 * min(size, 512) + 64 * 18) + 4096
        assert count.peak() - count.now("communication") <= 2 * out.nbytes + 6 * lse_bytes + blocks + kernel


class Block(nn.Module):
    """Self-attention on a shard of a sequence."""

    def __init__(self, group_name: str) -> None:
        super().__init__()
        self.qkv = nn.Linear(6, 18)
        self.group_name = group_name

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (9, 2)).transpose(1, 2).chunk(3, 1)
        out = torch.ops.weft.ring_attention(query, key, value, group_name=self.group_name, is_causal=True)
        return out.transpose(1, 2).flatten(2)


def _uneven(x: Tensor, sequence_size: int) -> Tensor:
    return weft.ops.ring_attention(x, x, x, group_name=_group(), is_causal=True, sequence_size=sequence_size)


@on_ranks(2, timeout=300)
def test_compile_export_script_and_autocast(rank: int) -> None:
    torch.manual_seed(3)
    block = Block(_group())
    inputs = {tokens: torch.randn(2, tokens, 6) + rank for tokens in (4, 6)}
    eager = check_compiled(block, inputs)
    compiled = torch.compile(_uneven, fullgraph=True, backend="aot_eager", dynamic=True)
    for size in (7, 9):
        x = torch.randn(1, 2, len(tokens_of(size, 2, rank, "head_tail")), 4, requires_grad=True)
        y = compiled(x, size)
        torch.testing.assert_close(y, _uneven(x, size))
        y.sum().backward()
        assert x.grad.shape == x.shape
    program = torch.export.export(block, (inputs[4],))
    targets = [str(node.target) for node in program.graph.nodes]
    assert targets.count("weft.ring_attention.default") == 1
    torch.testing.assert_close(program.run_decompositions().module()(inputs[4]), eager[4][0])
    torch.testing.assert_close(torch.jit.script(block)(inputs[6]), eager[6][0])
    with autocast(torch.bfloat16):
        y = block(inputs[4])
    assert y.dtype is torch.bfloat16
    torch.testing.assert_close(y.float(), eager[4][0], rtol=0.05, atol=0.05)
    tensors = [torch.randn(1, 2, 4, 2) for _ in range(3)]
    with autocast(torch.bfloat16):
        assert weft.ops.ring_attention(*tensors, group_name=_group()).dtype is torch.bfloat16


@on_ranks(2, 3)
def test_errors_are_the_same_on_all_ranks_and_leave_group_usable(rank: int, world_size: int) -> None:
    x, short, odd = torch.ones(2, 4, 6, 8), torch.ones(2, 4, 4, 8), torch.ones(2, 4, 3, 8)

    def call(*tensors: Tensor, **options: object) -> str:
        with pytest.raises((ValueError, TypeError)) as caught:
            weft.ops.ring_attention(*tensors, group_name=_group(), **options)
        return str(caught.value)

    texts = [
        call(x[0], x, x),
        call(x, short, x),
        call(x, x, x.double()),
        call(x.int(), x, x),
        call(x, x[:, :3], x[:, :3]),
        call(x, x, x[:, :2]),
        call(x, x, x, order="striped"),
        call(odd, odd, odd),
        call(x, x, x, window=3),
        call(x, x, x, window=0, is_causal=True),
        call(x, x, x, document_offsets=torch.ones(3)),
        call(x, x, x, document_offsets=torch.ones(3, 2, dtype=torch.int64)),
        call(x, x, x, document_offsets=torch.tensor([3, 2])),
        call(x, x, x, document_offsets=torch.tensor([[0, 1], [0, 99]])),
        call(x, x, x, document_offsets=torch.tensor([-1])),
    ]
    assert texts[0].startswith("weft::ring_attention: got query of shape [4, 6, 8]; pass [batch, heads, ")
    assert "got key of shape [2, 4, 4, 8] with query of shape [2, 4, 6, 8]" in texts[1]
    assert "got value of dtype Double with query of dtype Float" in texts[2]
    assert "got 4 query heads with 3 heads of key and 3 of value" in texts[4]
    assert "got order 'striped'; pass 'head_tail' or 'contiguous'" in texts[6]
    assert "in head_tail order without sequence_size" in texts[7]
    assert "got window 3 with is_causal false; pass the positive number of keys" in texts[8]
    assert "got window 0 with is_causal true; pass the positive number of keys" in texts[9]
    assert "got document_offsets of dtype Float and shape [3] with query of shape [2, 4, 6, 8]; pass int32" in texts[10]
    assert "got document_offsets of dtype Long and shape [3, 2] with query of shape" in texts[11]
    for text, offsets in zip(texts[12:], ("3, 2", "0, 99", "-1"), strict=True):
        assert f"got document_offsets [{offsets}] for a sequence of {6 * world_size} tokens; pass positions" in text
    of_ranks: list[list[str]] = [[] for _ in range(world_size)]
    dist.all_gather_object(of_ranks, texts)
    assert all(each == texts for each in of_ranks)
    wrong_size = call(x, x, x, sequence_size=100)
    assert f"on rank {rank} of {world_size} with sequence_size 100 of dim 2 in head_tail order" in wrong_size
    collectives_of(
        lambda: _ring({"query": x, "key": x, "value": x}, None), {"send": world_size - 1, "recv": world_size - 1}
    )


@on_ranks(2)
def test_second_derivative_raises() -> None:
    x = torch.ones(1, 1, 2, 2, requires_grad=True)
    y = _ring({"query": x, "key": x, "value": x}, None)
    with pytest.raises(NotImplementedError, match="weft::ring_attention: got a backward with create_graph=True"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
    y.sum().backward()  # on both ranks, the group is still usable


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("order", ORDERS)
def test_sequences_are_sharded_and_unsharded(rank: int, world_size: int, order: weft.ops.Order) -> None:
    for size, dim in ((12, 1), (12, -2), (7, 1), (1, 1), (0, 1)):
        full = torch.arange(2.0 * size * 3).reshape(2, size, 3)
        tokens = tokens_of(size, world_size, rank, order)
        x = full.clone().requires_grad_()
        shard = weft.ops.shard_sequence(x, dim, _group(), order=order)
        assert torch.equal(shard, full[:, tokens]) and shard.is_contiguous()
        shard.backward(2 * full[:, tokens])
        assert torch.equal(x.grad, 2 * full)

        x = full[:, tokens].requires_grad_()
        gathered = weft.ops.unshard_sequence(x, dim, _group(), order=order, dim_size=size)
        assert torch.equal(gathered, full)
        gathered.backward(3 * full)
        assert torch.equal(x.grad, 3 * full[:, tokens])
    ids = torch.arange(12).reshape(1, 12)
    own_ids = weft.ops.shard_sequence(ids, 1, _group(), order=order)
    assert torch.equal(weft.ops.unshard_sequence(own_ids, 1, _group(), order=order), ids)


@on_ranks(2)
def test_invalid_shards_of_sequences_raise(rank: int) -> None:
    x = torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"^weft.ops.shard_sequence: got order 'zigzag'; pass 'head_tail' or"):
        weft.ops.shard_sequence(x, 0, _group(), order="zigzag")
    with pytest.raises(
        IndexError, match=r"^weft.ops.shard_sequence: got dim 2 for x with 2 dims; pass one from -2 to 1"
    ):
        weft.ops.shard_sequence(x, 2, _group())
    with pytest.raises(
        ValueError, match=r"got x of shape \[2, 3\] without dim_size, which needs an even size of dim 1"
    ):
        weft.ops.unshard_sequence(x, 1, _group())
    with pytest.raises(ValueError, match=rf"on rank {rank} of 2 with dim_size 9, of which this rank's shard has"):
        weft.ops.unshard_sequence(x, 0, _group(), dim_size=9)
    with pytest.raises(ValueError, match=rf"with dim_size {2**60}, of which this rank's shard has"):
        weft.ops.unshard_sequence(x, 0, _group(), dim_size=2**60)
