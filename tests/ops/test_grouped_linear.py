"""grouped_linear: values, gradients, dtypes, saved tensors, temporaries, tracing, errors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import weft
from ops.experts import check_close, linear_of_experts
from ops.memory.counting import counted
from ops.operators import autocast

# The first and the last expert without rows, one expert with all rows, no experts, no rows.
COUNTS = ([3, 0, 4, 1], [0, 2, 0, 0, 5, 0], [6], [0, 0, 0], [], [1, 1, 1])
# Rounding of sums in another order. Half precision: rounding of the results to the dtype, too.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def _case(counts: list[int], dtype: torch.dtype, bias: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    torch.manual_seed(len(counts))
    x, weight = torch.randn(sum(counts), 5), torch.randn(len(counts), 3, 5)
    sizes = torch.tensor(counts, dtype=torch.int64)
    biases = torch.randn(len(counts), 3).to(dtype).requires_grad_() if bias else None
    return x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), sizes, biases


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_matches_a_loop_over_rows(counts: list[int], bias: bool, dtype: torch.dtype) -> None:
    x, weight, sizes, biases = _case(counts, dtype, bias)
    leaves = [each for each in (x, weight, biases) if each is not None]
    full = [each.detach().double().requires_grad_() for each in leaves]
    expected = linear_of_experts(full[0], full[1], sizes, full[2] if bias else None)
    y = weft.ops.grouped_linear(x, weight, sizes, biases)
    assert y.dtype is dtype and y.is_contiguous()
    check_close(y, expected, "result", TOLERANCE[dtype])
    grad = torch.randn_like(y)
    y.backward(grad)
    grads = torch.autograd.grad(expected, full, grad.double(), allow_unused=True, materialize_grads=True)
    for leaf, wanted in zip(leaves, grads, strict=True):
        check_close(leaf.grad, wanted, "gradient", TOLERANCE[dtype])


def test_weights_and_rows_with_strides() -> None:
    x, weight, sizes, _ = _case([3, 0, 4, 1], torch.float64, bias=False)
    expected = weft.ops.grouped_linear(x, weight, sizes)
    strided = torch.stack([x, x], -1)[..., 1], weight.transpose(1, 2).contiguous().transpose(1, 2)
    check_close(weft.ops.grouped_linear(*strided, sizes), expected, "result", 1e-12)


@pytest.mark.parametrize(
    ("needs", "kept"), [("x", {"weight", "counts"}), ("weight", {"x", "counts"}), ("bias", {"counts"})]
)
def test_saves_what_the_gradients_need(needs: str, kept: set[str]) -> None:
    x, weight, counts, bias = _case([3, 0, 4, 1], torch.float32, bias=True)
    tensors = {"x": x, "weight": weight, "counts": counts, "bias": bias}
    tensors = {name: each.detach() for name, each in tensors.items()}
    tensors[needs].requires_grad_()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: (saved.append(each), each)[1], lambda each: each):
        y = weft.ops.grouped_linear(*tensors.values())
    names = {each.data_ptr(): name for name, each in tensors.items()}
    assert {names[each.data_ptr()] for each in saved} == kept
    y.sum().backward()
    assert [name for name, each in tensors.items() if each.grad is not None] == [needs]


def test_allocates_only_the_results() -> None:
    x, weight = torch.randn(400, 64, requires_grad=True), torch.randn(5, 32, 64, requires_grad=True)
    counts = torch.tensor([100, 0, 250, 49, 1])
    weft.ops.grouped_linear(x, weight, counts).sum().backward()
    grad = torch.ones(400, 32)
    with counted() as count:
        y = weft.ops.grouped_linear(x, weight, counts)
        assert count.peak() <= y.nbytes + 64
        weft.memory.reset_peak()
        before = count.now()
        torch.autograd.grad(y, [x, weight], grad)
        assert count.peak() - before <= x.nbytes + weight.nbytes + 64


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, 5))
        self.bias = nn.Parameter(torch.randn(4, 3))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        return torch.ops.weft.grouped_linear(x, self.weight, counts, self.bias).sin()


def test_compile_export_script_and_autocast() -> None:
    torch.manual_seed(0)
    module = Experts()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=True)
    cases = [(torch.randn(sum(counts), 5), torch.tensor(counts)) for counts in ([1, 2, 0, 3], [3, 3, 3, 0])]
    for x, counts in cases:
        grads = []
        for each in (module, compiled):
            module.zero_grad()
            y = each(x, counts)
            y.sum().backward()
            grads.append([y.detach(), *(parameter.grad.clone() for parameter in module.parameters())])
        for ours, expected in zip(*grads, strict=True):
            torch.testing.assert_close(ours, expected)
    x, counts = cases[0]
    program = torch.export.export(module, (x, counts))
    assert "weft.grouped_linear.default" in [str(node.target) for node in program.graph.nodes]
    torch.testing.assert_close(program.run_decompositions().module()(x, counts), module(x, counts))
    torch.testing.assert_close(torch.jit.script(module)(x, counts), module(x, counts))
    with autocast(torch.bfloat16):
        y = weft.ops.grouped_linear(x, module.weight, counts, module.bias)
    assert y.dtype is torch.bfloat16
    torch.testing.assert_close(y.float().sin(), module(x, counts), rtol=0.05, atol=0.05)


ERRORS = [
    ({"x": torch.ones(6)}, ValueError, r"got x of shape \[6\]; pass rows that are sorted by expert"),
    ({"x": torch.ones(6, 5, dtype=torch.int64)}, TypeError, "got x of dtype Long; pass float32"),
    ({"weight": torch.ones(2, 3, 4)}, ValueError, r"got weight of shape \[2, 3, 4\] with x of shape \[6, 5\]"),
    ({"weight": torch.ones(3, 5)}, ValueError, r"got weight of shape \[3, 5\] with x of shape"),
    ({"weight": torch.ones(2, 3, 5).double()}, TypeError, "got weight of dtype Double with x of dtype Float"),
    ({"counts": torch.tensor([2, 4]).int()}, TypeError, "got counts of dtype Int; pass the number of rows"),
    ({"counts": torch.tensor([2, 2, 2])}, ValueError, r"got counts of shape \[3\] with weight of shape \[2, 3, 5\]"),
    ({"counts": torch.tensor([2, 3])}, ValueError, r"got counts \[2, 3\] for 6 rows of x; pass the number of rows of"),
    ({"counts": torch.tensor([2, 5])}, ValueError, r"got counts \[2, 5\] for 6 rows of x"),
    ({"counts": torch.tensor([-1, 7])}, ValueError, r"got counts \[-1, 7\] for 6 rows of x"),
    ({"bias": torch.ones(3)}, ValueError, r"got bias of shape \[3\] with weight of shape \[2, 3, 5\]; pass one row"),
]


@pytest.mark.parametrize(("change", "error", "text"), ERRORS)
def test_invalid_arguments_raise(change: dict[str, Tensor], error: type[Exception], text: str) -> None:
    arguments = {"x": torch.ones(6, 5), "weight": torch.ones(2, 3, 5), "counts": torch.tensor([2, 4])}
    with pytest.raises(error, match=f"^weft::grouped_linear: {text}"):
        weft.ops.grouped_linear(**arguments | change)


def test_second_derivative_raises() -> None:
    x, weight, counts, _ = _case([3, 0, 4, 1], torch.float32, bias=False)
    with pytest.raises(NotImplementedError, match="weft::grouped_linear: got a backward with create_graph=True"):
        torch.autograd.grad(weft.ops.grouped_linear(x, weight, counts).sum(), x, create_graph=True)
