"""Operators on ranks against the unsharded computation: values, gradients, communication."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import weft
from ops.collectives.profiled import collectives_of
from ops.operators import chunk, mlp_reference
from support.ranks import on_ranks

TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 3e-2, "float16": 4e-3}


def _close(actual: Tensor, expected: Tensor, tolerance: float, label: str) -> None:
    error = (actual.double() - expected.double()).abs().max().item() if expected.numel() else 0.0
    bound = tolerance * max(1.0, expected.double().abs().max().item() if expected.numel() else 0.0)
    assert error <= bound, f"{label}: {error:.2e} > {bound:.2e}"


def _group() -> str:
    return dist.group.WORLD.group_name


DIMS = {"w1": 0, "w3": 0, "b1": 0, "b3": 0, "w2": 1}
FORMS = [(True, True, "silu"), (True, False, "gelu"), (False, True, "gelu_tanh"), (False, False, "relu")]


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_column_row_mlp_matches_unsharded(rank: int, world_size: int, dtype: str) -> None:
    tolerance = TOLERANCE[dtype]
    for gated, bias, activation in FORMS:
        for hidden in (16, 7, 2):  # even, uneven, and empty on some ranks
            torch.manual_seed(1)
            shapes = {"w1": (hidden, 8), "w2": (6, hidden)}
            shapes |= {"w3": (hidden, 8)} if gated else {}
            shapes |= {"b1": (hidden,), "b2": (6,)} if bias else {}
            shapes |= {"b3": (hidden,)} if bias and gated else {}
            full = {
                name: (torch.randn(shape, dtype=torch.float64) * 0.4).to(getattr(torch, dtype)).double()
                for name, shape in shapes.items()
            }
            x = torch.randn(2, 3, 8).to(getattr(torch, dtype)).double()
            leaves = {name: value.clone().requires_grad_() for name, value in full.items()}
            full_x = x.clone().requires_grad_()
            y = mlp_reference(full_x, leaves, activation)
            y.sum().backward()

            def local(name: str, value: Tensor) -> Tensor:
                value = value.to(getattr(torch, dtype))
                if name == "b2":
                    return value.requires_grad_()
                return chunk(value, DIMS[name], world_size, rank)

            shards = {name: local(name, value) for name, value in full.items()}
            local_x = x.to(getattr(torch, dtype)).requires_grad_()
            out = weft.ops.column_row_mlp(local_x, **shards, activation=activation, group_name=_group())
            _close(out, y, tolerance, "y")
            out.sum().backward()
            _close(local_x.grad, full_x.grad, tolerance, "grad x")
            for name, shard in shards.items():
                expected = leaves[name].grad
                if name != "b2":
                    expected = chunk(expected, DIMS[name], world_size, rank)
                _close(shard.grad, expected, tolerance, f"grad {name}")


@on_ranks(1, 2, 3, 4)
def test_linears_and_embedding_match_unsharded(rank: int, world_size: int) -> None:
    for dtype in TOLERANCE:
        _check_linears_and_embedding(rank, world_size, dtype)


def _check_linears_and_embedding(rank: int, world_size: int, dtype: str) -> None:
    torch_dtype, tolerance = getattr(torch, dtype), TOLERANCE[dtype]
    torch.manual_seed(1)
    x, weight, bias, grad = (torch.randn(shape).to(torch_dtype) for shape in ((3, 5), (7, 5), (7,), (3, 7)))
    full = [t.double().clone().requires_grad_() for t in (x, weight, bias)]
    y = F.linear(*full)
    y.backward(grad.double())
    local_x, w, b = x.clone().requires_grad_(), *(chunk(t, 0, world_size, rank) for t in (weight, bias))
    out = weft.ops.column_linear(local_x, w, b, group_name=_group())
    _close(out, chunk(y, 1, world_size, rank), tolerance, "column y")
    out.backward(chunk(grad, 1, world_size, rank))
    _close(local_x.grad, full[0].grad, tolerance, "column grad x")
    _close(w.grad, chunk(full[1].grad, 0, world_size, rank), tolerance, "column grad weight")
    _close(b.grad, chunk(full[2].grad, 0, world_size, rank), tolerance, "column grad bias")

    local_x, w = (chunk(t, 1, world_size, rank) for t in (x, weight))
    b = bias.clone().requires_grad_()
    out = weft.ops.row_linear(local_x, w, b, group_name=_group())
    _close(out, y, tolerance, "row y")
    out.backward(grad)
    _close(local_x.grad, chunk(full[0].grad, 1, world_size, rank), tolerance, "row grad x")
    _close(w.grad, chunk(full[1].grad, 1, world_size, rank), tolerance, "row grad weight")
    _close(b.grad, full[2].grad, tolerance, "row grad bias")

    ids, grad = torch.tensor([[0, 6, 3], [2, 2, 5]]), torch.randn(2, 3, 5).to(torch_dtype)
    table = weight.double().clone().requires_grad_()
    F.embedding(ids, table).backward(grad.double())
    start, _ = weft.nn.shard_range(7, world_size, rank)
    rows = chunk(weight, 0, world_size, rank)
    out = weft.ops.vocab_parallel_embedding(ids, rows, start, group_name=_group(), vocab_size=7)
    assert torch.equal(out, F.embedding(ids, weight))
    out.backward(grad)
    _close(rows.grad, chunk(table.grad, 0, world_size, rank), tolerance, "embedding grad")


@on_ranks(2)
def test_number_of_all_reduces(rank: int) -> None:
    group = _group()
    x = torch.randn(3, 4, requires_grad=True)
    w1, w2 = torch.randn(6, 4, requires_grad=True), torch.randn(4, 6, requires_grad=True)

    def mlp(x: Tensor) -> Tensor:
        return weft.ops.column_row_mlp(x, w1, w2, activation="relu", group_name=group)

    collectives_of(lambda: mlp(x), {"all_reduce": 1})
    collectives_of(lambda: mlp(x).sum().backward(), {"all_reduce": 2})
    collectives_of(lambda: mlp(x.detach()).sum().backward(), {"all_reduce": 1})
    with torch.no_grad():
        collectives_of(lambda: mlp(x), {"all_reduce": 1})
    y = mlp(x)
    collectives_of(lambda: torch.autograd.grad(y.sum(), [w1, w2]), {})


@on_ranks(2)
def test_errors_leave_group_usable(rank: int) -> None:
    group = _group()
    x, w = torch.ones(3, 4), torch.ones(5, 4)
    with pytest.raises(ValueError, match="got w2 of shape"):
        weft.ops.column_row_mlp(x, w, torch.ones(4, 6), activation="silu", group_name=group)
    with pytest.raises(ValueError, match=r"activation 'swish'; pass one of"):
        weft.ops.column_row_mlp(x, w, w.t(), activation="swish", group_name=group)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no process group of this process"):
        weft.ops.row_linear(x, w, group_name="nowhere")
    with pytest.raises(TypeError, match="dtype"):
        weft.ops.column_linear(x, w.double(), group_name=group)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2


@on_ranks(2)
def test_token_ids_are_checked_before_communication(rank: int) -> None:
    """Token ids are checked only on the CPU."""
    with pytest.raises(IndexError, match="token ids from 0 to 9"):
        weft.ops.vocab_parallel_embedding(torch.tensor([0, 9]), torch.ones(5, 4), 0, group_name=_group(), vocab_size=5)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2
