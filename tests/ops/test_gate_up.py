"""column_row_mlp with gate and up weights in one storage: values, gradients, the number of products, fallbacks."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import profile

import weft
from ops.operators import chunk, mlp_reference
from support.ranks import on_ranks
from weft.nn import ColumnRowMLP, join_gate_up
from weft.nn.gate_up import are_joined

SHARDED_DIMS = {"w1": 0, "w3": 0, "w2": 1}
TOLERANCE = {torch.float64: 1e-12, torch.bfloat16: 3e-2}


def full_weights(hidden: int = 10) -> dict[str, Tensor]:
    torch.manual_seed(1)
    shapes = {"w1": (hidden, 6), "w2": (4, hidden), "w3": (hidden, 6)}
    return {name: (torch.randn(size, dtype=torch.float64) * 0.4) for name, size in shapes.items()}


def assert_close(actual: Tensor | None, expected: Tensor | None, what: str) -> None:
    assert (actual is None) == (expected is None), what
    if actual is not None and expected is not None:
        bound = TOLERANCE[actual.dtype] * max(1.0, expected.abs().max().item())
        assert (actual.double() - expected.double()).abs().max().item() <= bound, what


@on_ranks(1, 2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
@pytest.mark.parametrize("sequence_dim", [None, 0], ids=["replicated", "sequence"])
@pytest.mark.parametrize("recompute", [False, True], ids=["saved", "recompute"])
def test_matches_the_unsharded_mlp(
    rank: int, world_size: int, recompute: bool, sequence_dim: int | None, dtype: torch.dtype
) -> None:
    for frozen in ((), ("x",), ("w1",), ("w3", "w2"), ("x", "w1", "w3")):
        check_step(rank, world_size, recompute, sequence_dim, dtype, frozen)


def check_step(
    rank: int,
    world_size: int,
    recompute: bool,
    sequence_dim: int | None,
    dtype: torch.dtype,
    frozen: tuple[str, ...],
) -> None:
    full = {name: value.to(dtype).double() for name, value in full_weights().items()}
    full["x"] = torch.randn(7, 2, 6).to(dtype).double()
    for name, value in full.items():
        value.requires_grad_(name not in frozen)
    x = full.pop("x")
    y = mlp_reference(x, full, "silu")
    grad = torch.randn(y.shape).to(dtype).double()
    y.backward(grad)

    shards = {
        name: chunk(value.to(dtype), SHARDED_DIMS[name], world_size, rank, requires_grad=value.requires_grad)
        for name, value in full.items()
    }
    join_gate_up(shards["w1"], shards["w3"])
    assert are_joined(shards["w1"], shards["w3"])

    def local(value: Tensor) -> Tensor:
        return value if sequence_dim is None else chunk(value, sequence_dim, world_size, rank, requires_grad=False)

    local_x = local(x.detach().to(dtype)).clone().requires_grad_(x.requires_grad)
    out = weft.ops.column_row_mlp(
        local_x,
        **shards,
        activation="silu",
        group_name=dist.group.WORLD.group_name,
        recompute=recompute,
        sequence_dim=sequence_dim,
        sequence_size=None if sequence_dim is None else x.shape[sequence_dim],
    )
    assert_close(out, local(y.detach()), "y")
    out.backward(local(grad.to(dtype)))
    assert_close(local_x.grad, None if x.grad is None else local(x.grad), "gradient of x")
    for name, value in full.items():
        expected = None if value.grad is None else value.grad.chunk(world_size, SHARDED_DIMS[name])[rank]
        assert_close(shards[name].grad, expected, f"gradient of {name}")


def products_of_step(mlp: ColumnRowMLP, x: Tensor) -> int:
    with profile() as profiler:
        mlp(x).sum().backward()
    counts = Counter(event.name for event in profiler.events())
    return sum(counts[f"aten::{name}"] for name in ("mm", "addmm", "addmm_"))


def gated_mlp(dtype: torch.dtype = torch.float64) -> ColumnRowMLP:
    torch.manual_seed(2)
    return ColumnRowMLP(6, 10, group_name="", dtype=dtype)


@pytest.mark.parametrize("recompute", [False, True])
def test_number_of_products(recompute: bool) -> None:
    mlp = gated_mlp()
    mlp.recompute = recompute
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    # Forward: gate, up, down. Backward: the gradients of h, three weights, and x through gate and up; with
    # `recompute`, gate and up again.
    assert products_of_step(mlp, x) == 3 + 6 + 2 * recompute
    join_gate_up(mlp.w1, mlp.w3)
    assert products_of_step(mlp, x) == 2 + 5 + recompute


def gradients(mlp: torch.nn.Module, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(mlp(x).square().sum(), list(mlp.parameters())))


def test_a_copy_has_separate_weights_and_the_same_gradients() -> None:
    mlp, x = gated_mlp(), torch.randn(3, 6, dtype=torch.float64)
    expected = gradients(mlp, x)
    join_gate_up(mlp.w1, mlp.w3)
    assert are_joined(mlp.w1, mlp.w3)
    copied = copy.deepcopy(mlp)
    assert not are_joined(copied.w1, copied.w3)
    for each in (mlp, copied):
        for actual, gradient in zip(gradients(each, x), expected, strict=True):
            torch.testing.assert_close(actual, gradient, rtol=1e-12, atol=1e-12)


def test_saved_tensors_that_hooks_copy() -> None:
    mlp, x = gated_mlp(), torch.randn(3, 6, dtype=torch.float64)
    join_gate_up(mlp.w1, mlp.w3)
    expected = gradients(mlp, x)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved):
        actual = gradients(mlp, x)
    for mine, gradient in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, gradient, rtol=1e-12, atol=1e-12)


def test_compiled_module_with_joined_weights() -> None:
    mlp, x = gated_mlp(), torch.randn(3, 6, dtype=torch.float64)
    expected = gradients(mlp, x)
    join_gate_up(mlp.w1, mlp.w3)
    compiled = torch.compile(mlp, backend="aot_eager", fullgraph=True)
    for actual, gradient in zip(gradients(compiled, x), expected, strict=True):
        torch.testing.assert_close(actual, gradient, rtol=1e-12, atol=1e-12)


def test_autocast_multiplies_with_separate_copies() -> None:
    mlp, x = gated_mlp(torch.float32), torch.randn(3, 6)
    with torch.autocast("cpu", torch.bfloat16):
        expected = mlp(x)
        join_gate_up(mlp.w1, mlp.w3)
        assert torch.equal(mlp(x), expected)


def test_optimizer_and_state_dict_see_two_weights() -> None:
    mlp = gated_mlp()
    expected = copy.deepcopy(mlp)
    join_gate_up(mlp.w1, mlp.w3)
    join_gate_up(mlp.w1, mlp.w3)  # joined already
    x = torch.randn(3, 6, dtype=torch.float64)
    for each in (mlp, expected):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            each(x).square().sum().backward()
            optimizer.step()
    for (name, actual), value in zip(mlp.state_dict().items(), expected.state_dict().values(), strict=True):
        torch.testing.assert_close(actual, value, rtol=1e-12, atol=1e-12, msg=name)
    mlp.load_state_dict(gated_mlp().state_dict())
    assert are_joined(mlp.w1, mlp.w3)
    assert torch.equal(mlp.w3, gated_mlp().w3)


def test_one_tensor_as_both_weights_raises() -> None:
    weight = torch.zeros(4, 3)
    with pytest.raises(ValueError, match="got one tensor as both weights; pass two weights that have values"):
        join_gate_up(weight, weight)


@pytest.mark.parametrize(
    ("gate", "up", "sentence"),
    [
        (torch.zeros(4, 3).t(), torch.zeros(3, 4), r"shape \[3, 4\] and strides \[1, 3\]; pass contiguous matrices"),
        (torch.zeros(4), torch.zeros(4), r"shape \[4\] and strides \[1\]"),
        (torch.zeros(4, 3), torch.zeros(5, 3), r"\[4, 3\] torch.float32 on cpu and \[5, 3\] torch.float32 on cpu"),
        (torch.zeros(4, 3), torch.zeros(4, 3).double(), "pass weights of one shape, dtype and device"),
        (torch.zeros(4, 3, device="meta"), torch.zeros(4, 3), "got weights on the meta device"),
    ],
)
def test_weights_that_do_not_fit_raise(gate: Tensor, up: Tensor, sentence: str) -> None:
    before = gate.untyped_storage().data_ptr(), up.untyped_storage().data_ptr()
    with pytest.raises(ValueError, match=sentence):
        join_gate_up(gate, up)
    assert (gate.untyped_storage().data_ptr(), up.untyped_storage().data_ptr()) == before
