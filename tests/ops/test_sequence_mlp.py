"""column_row_mlp in sequence parallelism: values, gradients, communication, saved bytes, errors."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import weft
from ops.collectives.profiled import collectives_of
from ops.memory.counting import counted
from ops.operators import chunk, mlp_reference
from ops.overlapping import overlapping
from support.ranks import on_ranks

TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 3e-2}
DIMS = {"w1": 0, "w3": 0, "b1": 0, "b3": 0, "w2": 1}
FORMS = [(True, True, "silu"), (True, False, "gelu"), (False, True, "gelu_tanh"), (False, False, "relu")]
# (shape of the unsharded input, sequence dim): even except on 3 ranks, uneven, empty on some ranks.
INPUTS = [((8, 2, 6), 0), ((2, 7, 6), 1), ((1, 6), -2)]


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
@pytest.mark.parametrize("recompute", [False, True])
def test_values_and_gradients(
    rank: int, world_size: int, dtype: str, recompute: bool, overlap: weft.overlap.Mode
) -> None:
    with overlapping(overlap):
        _check_values_and_gradients(rank, world_size, dtype, recompute)


def _check_values_and_gradients(rank: int, world_size: int, dtype: str, recompute: bool) -> None:
    torch_dtype = getattr(torch, dtype)
    for shape, dim in INPUTS:
        for gated, bias, activation in FORMS:
            torch.manual_seed(1)
            hidden = 5  # uneven, and empty on one of 4 ranks
            shapes = {"w1": (hidden, 6), "w2": (4, hidden)}
            shapes |= {"w3": (hidden, 6)} if gated else {}
            shapes |= {"b1": (hidden,), "b2": (4,)} if bias else {}
            shapes |= {"b3": (hidden,)} if bias and gated else {}
            full = {name: (torch.randn(size) * 0.4).to(torch_dtype).double() for name, size in shapes.items()}
            full = {name: value.requires_grad_() for name, value in full.items()}
            x = torch.randn(shape).to(torch_dtype).double().requires_grad_()
            y = mlp_reference(x, full, activation)
            grad = torch.randn(y.shape).to(torch_dtype).double()
            y.backward(grad)

            shards = {
                name: chunk(value.to(torch_dtype), DIMS[name], world_size, rank)
                if name in DIMS
                else value.detach().to(torch_dtype).requires_grad_()
                for name, value in full.items()
            }
            local_x = chunk(x.to(torch_dtype), dim, world_size, rank)
            out = weft.ops.column_row_mlp(
                local_x,
                **shards,
                activation=activation,
                group_name=_group(),
                recompute=recompute,
                sequence_dim=dim,
                sequence_size=shape[dim],
            )
            _close(out, chunk(y, dim, world_size, rank), dtype, "y")
            out.backward(chunk(grad.to(torch_dtype), dim, world_size, rank))
            _close(local_x.grad, chunk(x.grad, dim, world_size, rank), dtype, "grad x")
            for name, shard in shards.items():
                expected = full[name].grad
                if name in DIMS:
                    expected = chunk(expected, DIMS[name], world_size, rank)
                _close(shard.grad, expected, dtype, f"grad {name}")


def _leaves() -> dict[str, Tensor]:
    torch.manual_seed(0)
    shapes = {"x": (3, 2, 8), "w1": (6, 8), "w2": (8, 6), "w3": (6, 8)}
    return {name: torch.randn(shape, requires_grad=True) for name, shape in shapes.items()}


def _mlp(leaves: dict[str, Tensor], recompute: bool = False) -> Tensor:
    return weft.ops.column_row_mlp(
        **leaves, activation="silu", group_name=_group(), recompute=recompute, sequence_dim=0
    )


@on_ranks(2)
@pytest.mark.parametrize("recompute", [False, True])
def test_number_of_collectives(rank: int, recompute: bool) -> None:
    gather, scatter = "all_gather_into_tensor", "reduce_scatter_tensor"
    leaves = _leaves()
    y = collectives_of(lambda: _mlp(leaves, recompute), expected={gather: 1, scatter: 1})
    collectives_of(lambda: y.sum().backward(retain_graph=True), expected={gather: 2, scatter: 1})
    first = {name: leaf.grad.clone() for name, leaf in leaves.items()}
    y.sum().backward()
    for name, leaf in leaves.items():
        assert torch.equal(leaf.grad, first[name] * 2), name
    with torch.no_grad():
        collectives_of(lambda: _mlp(leaves, recompute), expected={gather: 1, scatter: 1})
    # Each gradient needs the gathered gradient of y. The gradients of w1 and w3, and recomputing, also need gathered x.
    for wanted, expected in [
        (["w2"], {gather: 1 + recompute}),
        (["x"], {gather: 1 + recompute, scatter: 1}),
        (["w1"], {gather: 2}),
        (["w3", "w2"], {gather: 2}),
    ]:
        y = _mlp(leaves, recompute)
        grads = collectives_of(lambda y=y, w=wanted: torch.autograd.grad(y.sum(), [leaves[n] for n in w]), expected)
        for name, grad in zip(wanted, grads, strict=True):
            torch.testing.assert_close(grad, first[name], msg=name)
    # The gradient of a bias does not need x; only recomputing does.
    bias = torch.zeros(6, requires_grad=True)
    frozen = {name: leaf.detach() for name, leaf in leaves.items()}
    y = _mlp({**frozen, "b1": bias}, recompute)
    collectives_of(y.sum().backward, expected={gather: 1 + recompute})
    # The node of b3 must not consume the gathered x that the later node of w1 needs.
    y = _mlp({**frozen, "w1": leaves["w1"], "b3": bias}, recompute)
    grads = collectives_of(lambda: torch.autograd.grad(y.sum(), [leaves["w1"], bias]), expected={gather: 2})
    torch.testing.assert_close(grads[0], first["w1"])
    with torch.autograd.set_detect_anomaly(True):
        torch.testing.assert_close(torch.autograd.grad(_mlp(leaves).sum(), leaves["x"])[0], first["x"])


@on_ranks(2)
@pytest.mark.parametrize("recompute", [False, True])
def test_saved_bytes(rank: int, recompute: bool) -> None:
    """Besides y and the shard of x, a call keeps the hidden values of the full sequence; with recompute, nothing."""
    leaves = _leaves()
    with counted() as count:
        y = _mlp(leaves, recompute)
        saved = 0 if recompute else 2 * (6 * 2 * 6 * 4)  # h1 and h3, [6, 2, 6]
        assert count.now() - count.now("communication") == y.nbytes + saved
        y.sum().backward()
        del y
        grads = sum(leaf.grad.nbytes for leaf in leaves.values())
        assert count.now() - count.now("communication") == grads


@on_ranks(2)
def test_errors_leave_group_usable(rank: int) -> None:
    x, w1, w2 = torch.ones(3, 4), torch.ones(5, 4), torch.ones(4, 5)

    def mlp(**options: int) -> Tensor:
        return weft.ops.column_row_mlp(x, w1, w2, activation="relu", group_name=_group(), **options)

    with pytest.raises(ValueError, match=r"weft::column_row_mlp: got sequence_size 6 without sequence_dim"):
        mlp(sequence_size=6)
    with pytest.raises(ValueError, match=r"weft::column_row_mlp: got sequence_dim 1, the last dim of x"):
        mlp(sequence_dim=-1)
    with pytest.raises(IndexError, match="got sequence_dim 2 for x with 2 dims"):
        mlp(sequence_dim=2)
    with pytest.raises(ValueError, match=rf"got x of shape \[3, 4\] on rank {rank} of 2 with sequence_size 9 of dim 0"):
        mlp(sequence_dim=0, sequence_size=9)
    assert torch.equal(mlp(sequence_dim=0), torch.full((3, 4), 40.0))


@on_ranks(1, 2, timeout=300)
def test_compile_export_and_script(rank: int) -> None:
    torch.manual_seed(rank)
    for recompute in (False, True):
        mlp = weft.nn.ColumnRowMLP(8, 10, bias=True, recompute=recompute, sequence_dim=1, group_name=_group())

        def run(module: torch.nn.Module, tokens: int, mlp: torch.nn.Module = mlp) -> list[Tensor]:
            mlp.zero_grad(set_to_none=True)
            x = torch.arange(tokens * 16.0).reshape(2, tokens, 8).sin().requires_grad_()
            y = module(x)
            y.square().sum().backward()
            return [y.detach(), x.grad, *(p.grad.clone() for p in mlp.parameters())]

        eager = {tokens: run(mlp, tokens) for tokens in (3, 5)}
        torch._dynamo.reset()
        for dynamic in (False, True):
            compiled = torch.compile(mlp, fullgraph=True, backend="aot_eager", dynamic=dynamic)
            for tokens in eager if dynamic else (3,):
                torch.testing.assert_close(run(compiled, tokens), eager[tokens])
        scripted = torch.jit.script(mlp)
        for _ in range(3):
            torch.testing.assert_close(run(scripted, 3), eager[3])
        program = torch.export.export(mlp, (torch.ones(2, 4, 8),), dynamic_shapes=({1: torch.export.Dim("s", min=2)},))
        assert [str(n.target) for n in program.graph.nodes].count("weft.column_row_mlp.default") == 1
        torch.testing.assert_close(program.module()(torch.ones(2, 5, 8)), mlp(torch.ones(2, 5, 8)))
