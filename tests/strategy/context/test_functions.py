"""Functions of sharded sequences, compared with the same functions of full tensors; counts of the communications."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from support.ranks import run_on_ranks
from weft.strategy.context.entry import Context
from weft.strategy.context.masks import causal_mask_of
from weft.strategy.context.sharded_sequence import ShardedSequence, full_sequences

SHAPE = (2, 11, 4)  # batch, tokens, features; the tokens do not divide by the ranks
WEIGHT = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(6, 4)
MASK = torch.arange(11) % 3 == 0
TARGET = torch.arange(22).reshape(2, 11) % 4
TARGET_IGNORED = TARGET.masked_fill(TARGET == 1, -100)
POSITIONS = torch.arange(11, dtype=torch.float64)[:, None] / 7
CAUSAL = torch.ones(11, 11, dtype=torch.bool).tril()
_DOCUMENTS = torch.stack([torch.tensor([0, 4, 5, 11]), torch.tensor([0, 0, 6, 6])])
_DOCUMENT_OF = torch.stack([torch.bucketize(torch.arange(11), offsets, right=True) for offsets in _DOCUMENTS])
SAME_DOCUMENT = _DOCUMENT_OF[:, :, None] == _DOCUMENT_OF[:, None]
CLASS_WEIGHT = torch.tensor([0.5, 1.0, 2.0, 0.25], dtype=torch.float64)


def _in_place(x: Tensor) -> Tensor:
    y = x * 1
    y += POSITIONS
    y.mul_(x)
    return y.masked_fill_(MASK[:, None], 0.5)


def _heads(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y = torch.stack([x, x * 2, x.sin()], 2)  # [batch, tokens, 3, features]
    q, k, v = y.view(x.size(0), x.size(1), 3, 2, x.size(2) // 2).permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


def _manual_attention(x: Tensor) -> Tensor:
    q, k, v = _heads(x)
    tokens = x.size(1)
    scores = (q @ k.transpose(-2, -1)) / 2**0.5
    scores = scores.masked_fill(torch.ones(tokens, tokens).tril().logical_not(), float("-inf"))
    return (scores.softmax(dim=-1) @ v).transpose(1, 2).contiguous().view(x.shape)


def _view_in_place(x: Tensor) -> Tensor:
    y = x * 1
    y[:, 1:].mul_(2)
    y.transpose(1, 2).add_(1)
    return y


def _filled(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    y[..., ::2] = x[..., 1::2]
    y[..., 1::2] = 2
    y[:, 2:5, :2] = WEIGHT[:3, :2]
    return y.zero_() + y


def _changed(x: Tensor, index: Any, value: Any) -> Tensor:
    y = x * 1
    y[index] = value
    return y


def _changed_token(x: Tensor) -> Tensor:
    y = x * 1
    token = y[:, 3:4]
    token += WEIGHT[0]
    return y


def _accumulated(x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y += x
    with torch.no_grad():
        scale = (y * 2).mean()
    return y * scale


def _dropped_in_place(x: Tensor) -> Tensor:
    y = x * 1
    F.dropout(y, 1.0, inplace=True)
    return y + x


def _rotary(x: Tensor) -> Tensor:
    """Return the rotation by complex numbers and back, by the same table."""
    table = torch.polar(torch.ones(11, 2, dtype=x.dtype), torch.arange(22, dtype=x.dtype).view(11, 2))
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.cat([torch.view_as_real(pairs * each).flatten(2) for each in (table, table.conj())], -1)


def _query_of_one_head(x: Tensor) -> Tensor:
    heads = x[:, None].repeat(1, 2, 1, 1)
    return F.scaled_dot_product_attention(x[:, None], heads, heads) + F.scaled_dot_product_attention(
        heads, heads[:1], heads[:1]
    )


# function, whether it may gather full sequences
CASES: dict[str, tuple[Callable[[Tensor], Any], bool]] = {
    "arithmetic": (lambda x: (1 - x) * x / (x * x + 2) - x**2, False),
    "activations": (lambda x: F.gelu(x) + F.silu(x) + x.relu() + torch.tanh(x) + x.sigmoid(), False),
    "bias": (lambda x: x + torch.arange(4.0, dtype=x.dtype), False),
    "positions": (lambda x: x + POSITIONS, False),
    "positions_of_batch": (lambda x: POSITIONS.expand(2, 11, 4) * x, False),
    "in_place": (_in_place, False),
    "where": (lambda x: torch.where(x > 0, x, POSITIONS), False),
    "cast": (lambda x: x.float().to(torch.float64) + x.to(x), False),
    "linear": (lambda x: F.linear(x, WEIGHT), False),
    "matmul": (lambda x: x @ WEIGHT.t(), False),
    "addmm": (lambda x: torch.addmm(WEIGHT[:, 0], x.view(-1, 4), WEIGHT.t()).view(2, 11, 6), False),
    "einsum": (lambda x: torch.einsum("btf,of->bto", x, WEIGHT), False),
    "einsum_sum": (lambda x: torch.einsum("btf,btg->bfg", x, x.sin()), False),
    "linear_attention": (lambda x: x @ (x.transpose(1, 2) @ x.sin()), False),
    "manual_attention": (_manual_attention, False),
    "columns": (lambda x: WEIGHT @ x.transpose(1, 2), False),
    "layer_norm": (lambda x: F.layer_norm(x, (4,)) + F.rms_norm(x, (4,)), False),
    "softmax": (lambda x: x.softmax(-1) + F.log_softmax(x, dim=-1), False),
    "softmax_of_tokens": (lambda x: x.softmax(1), True),
    "reshape": (lambda x: x.reshape(-1, 2, 2).flatten(1).view(2, 11, 4), False),
    "split_tokens": (lambda x: x.permute(1, 0, 2).reshape(11, 8).unflatten(1, (2, 4)), False),
    "transposes": (lambda x: x.transpose(1, 2).mT.permute(2, 0, 1).movedim(0, -1).unsqueeze(1).squeeze(1), False),
    "index": (lambda x: x[:, :, None, 1:3] * x[..., 0, None, None], False),
    "shift": (lambda x: x[:, :-1] * 2, False),
    "shifted_product": (lambda x: x[:, 1:] * x[:, :-1], True),
    "last_token": (lambda x: x[:, -1], False),
    "first_token": (lambda x: x.select(1, 0) + x[:, 3], False),
    "narrow": (lambda x: x.narrow(1, 2, 5).narrow(2, 0, 2), False),
    "names_in_another_order": (
        lambda x: (
            x.narrow(length=2, start=1, dim=1)[0] + torch.movedim(x, destination=1, source=0).select(index=0, dim=1)[:2]
        ),
        False,
    ),
    "sum_of_no_dims": (lambda x: x.sum([]) + x.mean(dim=[]), False),
    "chunks": (lambda x: torch.cat([each * i for i, each in enumerate(x.chunk(2, -1))], -1), False),
    "unbind": (lambda x: torch.stack(x.unbind(-1), 1), False),
    "unbind_batch": (lambda x: torch.stack(list(x.unbind(0))), False),
    "class_token": (lambda x: torch.cat([torch.ones(2, 1, 4, dtype=x.dtype), x], 1) * 2, False),
    "empty_cache": (lambda x: torch.cat([torch.tensor([], dtype=x.dtype), x], dim=-2), False),
    "expand": (lambda x: x[:, None].expand(2, 3, 11, 4) * x.unsqueeze(1), False),
    "repeat_heads": (lambda x: x[:, None].repeat_interleave(2, 1).repeat(1, 2, 1, 1), False),
    "sum": (lambda x: x.sum() + x.mean(), False),
    "sum_of_tokens": (lambda x: x.sum(1) + x.mean(dim=1) + x.mean((0, 1)), False),
    "sum_of_features": (lambda x: x.sum(-1, keepdim=True) + x.mean(-1, keepdim=True), False),
    "center": (lambda x: x - x.mean(1, keepdim=True), False),
    "max_of_tokens": (lambda x: x.amax(1), True),
    "max": (lambda x: x.max(dim=-1).values, False),
    "topk": (lambda x: x.topk(2, dim=-1).values, False),
    "norm": (lambda x: x.norm(dim=-1), False),
    "cumsum": (lambda x: x.cumsum(1), True),
    "mask_rows": (lambda x: x[:, MASK], True),
    "pad": (lambda x: F.pad(x, (1, 2)), False),
    "pad_tokens": (lambda x: F.pad(x, (0, 0, 1, 0)), True),
    "cross_entropy": (lambda x: F.cross_entropy(x.view(-1, 4), TARGET.view(-1)), False),
    "cross_entropy_shifted": (
        lambda x: F.cross_entropy(x[:, :-1].reshape(-1, 4), TARGET[:, 1:].reshape(-1), label_smoothing=0.1),
        False,
    ),
    "cross_entropy_ignored": (
        lambda x: F.cross_entropy(x.transpose(1, 2), TARGET_IGNORED, weight=CLASS_WEIGHT),
        False,
    ),
    "cross_entropy_none": (
        lambda x: (F.cross_entropy(x.flatten(0, 1), TARGET_IGNORED.flatten(), reduction="none") * 2).sum(),
        False,
    ),
    "cross_entropy_sum": (lambda x: F.cross_entropy(x.flatten(0, 1), TARGET.flatten(), reduction="sum"), False),
    "cross_entropy_of_probabilities": (
        lambda x: F.cross_entropy(x.flatten(0, 1), WEIGHT[:, 0].softmax(0)[:4].expand(22, 4)),
        False,
    ),
    "mse": (lambda x: F.mse_loss(x, POSITIONS.expand(2, 11, 4)) + F.l1_loss(x, x.detach() * 2), False),
    "attention": (lambda x: F.scaled_dot_product_attention(*_heads(x), is_causal=True), False),
    "attention_full": (lambda x: F.scaled_dot_product_attention(*_heads(x), scale=0.3), False),
    "attention_mask": (
        lambda x: F.scaled_dot_product_attention(*_heads(x), attn_mask=(torch.ones(11, 11) - MASK.double()).tril() > 0),
        False,
    ),
    "attention_window": (
        lambda x: F.scaled_dot_product_attention(*_heads(x), attn_mask=CAUSAL.triu(-3)),
        False,
    ),
    "attention_documents": (
        lambda x: F.scaled_dot_product_attention(*_heads(x), attn_mask=(CAUSAL & SAME_DOCUMENT)[:, None].triu(-4)),
        False,
    ),
    "attention_bias": (
        lambda x: F.scaled_dot_product_attention(
            *_heads(x), attn_mask=(POSITIONS - POSITIONS.T)[None, None].expand(2, 2, 11, 11)
        ),
        False,
    ),
    "attention_of_slice": (
        lambda x: F.scaled_dot_product_attention(*(each[:, :, 2:] for each in _heads(x)), is_causal=True),
        False,
    ),
    "attention_with_class_token": (
        lambda x: F.scaled_dot_product_attention(
            *_heads(torch.cat([torch.ones(2, 1, 4, dtype=x.dtype), x], 1)), is_causal=True
        ),
        False,
    ),
    "accuracy": (lambda x: (x.argmax(-1) == TARGET).double().mean() + x.mean(), False),
    "mean_item": (lambda x: x.sum() * float(x.mean()), False),
    "variance_of_batch": (lambda x: x.var(0, True) + x.std(0, False, True) + x.var(0, unbiased=False), False),
    "norms": (lambda x: torch.linalg.vector_norm(x, dim=-1) + torch.linalg.norm(x, 2, -1), False),
    "named_input": (
        lambda x: (
            torch.unsqueeze(input=torch.softmax(input=x, dim=-1), dim=0) + torch.sum(input=x, dim=1, keepdim=True)
        ),
        False,
    ),
    "names_of_numpy": (
        lambda x: torch.cat([x, x * 2], axis=2) + torch.stack([x, x], axis=3).sum(axis=0).flatten(1),
        False,
    ),
    "sort_by_axis": (lambda x: torch.sort(x, axis=1)[0], True),
    "flip_of_several_dims": (lambda x: x.flip(0, 1), True),
    "diff": (lambda x: torch.diff(x, dim=-1, prepend=x[..., :1]), True),
    "where_positions": (lambda x: x[torch.where(x > 0)].sum(), True),
    "types_of_others": (lambda x: torch.ones(4).type_as(x) * x + torch.ones(3).to(x).sum() + x.to(WEIGHT), False),
    "shapes_of_others": (
        lambda x: WEIGHT[0].expand_as(x) + WEIGHT.flatten()[:22].view(11, 2).sum(-1).view(11, 1) * x,
        False,
    ),
    "one_token": (lambda x: (x[0, 3:4][..., None] @ torch.ones(5, 1, 4, dtype=x.dtype)) + x[0, 3:4, None], True),
    "view_in_place": (_view_in_place, False),
    "filled": (_filled, False),
    "filled_token": (lambda x: _changed(x, (slice(None), 0), x[:, 3]), True),
    "filled_mask": (lambda x: _changed(x, x > 0, 0.5), True),
    "filled_rows": (lambda x: _changed(x, (slice(None), MASK), WEIGHT[0]), True),
    "changed_token": (_changed_token, True),
    "cumsum_in_place": (lambda x: (x * 1).cumsum_(1), True),
    "accumulated": (_accumulated, False),
    "dropped_in_place": (_dropped_in_place, False),
    "requires_grad": (lambda x: x.detach().requires_grad_().detach() + x, False),
    "rotary": (_rotary, False),
    "baddbmm": (lambda x: torch.baddbmm(POSITIONS[None, None, :, 0], x, x.mT, beta=0.5, alpha=2), False),
    "sum_with_plain": (lambda x: x.mT @ POSITIONS, False),
    "einsum_dots": (
        lambda x: (
            torch.einsum("...id,...jd->...ij", x, x) + torch.einsum("b...d,de", x, WEIGHT[:4]).transpose(0, 1)[..., :1]
        ),
        False,
    ),
    "einsum_diagonal": (lambda x: torch.einsum("tt->t", x[0] @ x[1].t()), True),
    "gather": (lambda x: x.log_softmax(-1).gather(-1, TARGET[..., None]), False),
    "weighted_mse": (lambda x: F.mse_loss(x, torch.zeros_like(x), weight=CLASS_WEIGHT.expand(2, 11, 4)), True),
    "query_of_one_head": (_query_of_one_head, False),
    "frequencies": (lambda x: F.embedding(x.argmax(-1), WEIGHT * x.sum(), scale_grad_by_freq=True), True),
}


def _values(result: Any) -> Tensor:
    return full_sequences(result)


def _compare(rank: int, world_size: int, attention: str, names: list[str]) -> dict[str, Any]:
    context = Context(dist.group.WORLD, attention)
    found: dict[str, Any] = {}
    for name in names:
        function, _ = CASES[name]
        torch.manual_seed(5)
        x = torch.randn(SHAPE, dtype=torch.float64)
        reference, mine = x.clone().requires_grad_(), x.clone().requires_grad_()
        expected = function(reference)
        factors = torch.randn(expected.shape, dtype=torch.float64)
        (expected * factors).sum().backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            from weft.strategy.context import sharded_sequence

            sharded_sequence._warn_gathers.cache_clear()
            result = function(context.shard(mine * 1.0, 1))
        gathers = sorted(
            {str(each.message).split(" for ")[1].split(",")[0] for each in caught if "gathers" in str(each.message)}
        )
        actual = _values(result)
        (actual * factors).sum().backward()
        dist.all_reduce(mine.grad)
        error = (actual - expected).abs().max().item()
        gradient_error = (mine.grad / world_size - reference.grad).abs().max().item()
        found[name] = (error, gradient_error, gathers, isinstance(result, ShardedSequence), tuple(actual.shape))
        assert tuple(actual.shape) == tuple(expected.shape), name
    return found


_ATTENTION = [name for name in CASES if "attention" in name or name == "query_of_one_head"]


@pytest.mark.parametrize(
    ("attention", "num_ranks", "names"),
    [("ring", 2, list(CASES)), ("ulysses", 2, list(CASES)), ("ring_ulysses", 4, _ATTENTION)],
    ids=["ring", "ulysses", "ring_ulysses"],
)
def test_functions_of_shards_are_those_of_full_tensors(attention: str, num_ranks: int, names: list[str]) -> None:
    results = run_on_ranks(num_ranks, _compare, attention=attention, names=names)[0]
    wrong = {name: each for name, each in results.items() if max(each[:2]) > 1e-12}
    assert not wrong
    gathering = {name: each[2] for name, each in results.items() if bool(each[2]) != CASES[name][1]}
    assert not gathering


CASES_OF_FEW_TOKENS: dict[str, Callable[[Tensor], Any]] = {
    "reflected": lambda x: F.pad(x, (1, 1), mode="reflect"),
    "learned_bias": lambda x: F.scaled_dot_product_attention(x, x, x, attn_mask=x.sum(-1)[:, None]),
    "query_of_one_head": _query_of_one_head,
}


def _compare_few_tokens(name: str) -> None:
    function, context = CASES_OF_FEW_TOKENS[name], Context(dist.group.WORLD, "ring")
    x = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(2, 3, 4)
    reference, mine = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected, actual = function(reference), full_sequences(function(context.shard(mine * 1.0, 1)))
    expected.sin().sum().backward()
    actual.sin().sum().backward()
    dist.all_reduce(mine.grad)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(mine.grad / dist.get_world_size(), reference.grad)


@pytest.mark.parametrize("name", CASES_OF_FEW_TOKENS)
def test_functions_where_ranks_have_no_tokens(name: str) -> None:
    """All ranks make the same calls, in the backward, too."""
    run_on_ranks(4, _compare_few_tokens, name=name)


def _compare_half(dtype: torch.dtype) -> None:
    x = (torch.arange(2 * 4000 * 4) % 41).to(dtype).reshape(2, 4000, 4)  # sums do not fit into float16
    target = torch.arange(8000).reshape(2, 4000) % 4
    sequence = Context(dist.group.WORLD, "ring").shard(x, 1)

    def means(x: Tensor) -> list[Tensor]:
        return [x.mean(), x.mean(1), F.mse_loss(x, x * 0.5), F.cross_entropy(x.flatten(0, 1), target.flatten())]

    for actual, expected in zip(means(sequence), means(x.float()), strict=True):
        assert actual.dtype == dtype
        torch.testing.assert_close(actual.float(), expected, rtol=2e-2, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_means_of_half_precision(dtype: torch.dtype) -> None:
    run_on_ranks(2, _compare_half, dtype=dtype)


@pytest.mark.parametrize("offsets", [None, [0, 3], [2, 5, 6, 9]], ids=str)
@pytest.mark.parametrize("window", [None, 1, 2, 5])
def test_masks_that_are_recognised(offsets: list[int] | None, window: int | None) -> None:
    """Each mask has the same pairs as the one from which it was read."""
    tokens = torch.arange(12)
    mask = tokens[:, None] >= tokens
    documents = torch.bucketize(tokens, torch.tensor(offsets or [0]), right=True)
    mask = mask & (documents[:, None] == documents)
    if window is not None:
        mask = mask.triu(1 - window)
    found = causal_mask_of(mask.expand(2, 1, 12, 12), 12)
    assert found is not None
    numbers = causal_mask_of(torch.zeros(12, 12).masked_fill(~mask, -torch.inf), 12)
    assert numbers is not None and numbers.window == found.window
    again = tokens[:, None] >= tokens
    if found.document_offsets is not None:
        again = again & _same_document(found.document_offsets[0], tokens)
    assert torch.equal(mask, again if found.window is None else again.triu(1 - found.window))


def _same_document(offsets: Tensor, tokens: Tensor) -> Tensor:
    documents = torch.bucketize(tokens, offsets, right=True)
    return documents[:, None] == documents


def test_masks_that_are_not_recognised() -> None:
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    bias = torch.zeros(6, 6).masked_fill(~causal, -1e9)
    hole, empty_row, future = causal.clone(), causal.clone(), causal.clone()
    hole[4, 1], empty_row[0, 0], future[2, 3] = False, False, True
    growing = causal & torch.tensor([0, 0, 0, 2, 1, 1])[:, None].le(torch.arange(6))  # no window, no documents
    for mask in (hole, empty_row, future, growing, bias, causal.double(), causal[:, :5], causal.expand(2, 3, 6, 6)):
        assert causal_mask_of(mask, 6) is None
