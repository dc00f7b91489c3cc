"""rms_norm, layer_norm and their fused residual adds: torch's values; gradients are summed over sharded tokens."""

from __future__ import annotations

import io

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from ops.collectives.profiled import collectives_of
from ops.memory.counting import counted
from ops.operators import autocast, chunk
from support.ranks import on_ranks

TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 3e-2, "float16": 6e-3}
# (shape, sharded dim): some or all ranks have no tokens; there is one feature, none, or more than a tile has.
SHAPES = [((2, 7, 12), 1), ((3, 1), 0), ((5, 700), 0), ((1, 2, 33), 1), ((0, 4), 0), ((3, 0), 0)]


def _group() -> str:
    return dist.group.WORLD.group_name


def _assert_close(actual: Tensor, expected: Tensor, dtype: str, label: str, scale: float = 1.0) -> None:
    assert actual.shape == expected.shape, label
    bound = TOLERANCE[dtype] * max(scale, expected.abs().max().item() if expected.numel() else 0.0)
    error = (actual.double() - expected.double()).abs().max().item() if expected.numel() else 0.0
    assert error <= bound, f"{label}: {error:.2e} > {bound:.2e}"


def _reference(norm: str, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if norm == "rms":
        return F.rms_norm(x, x.shape[-1:], weight, 1e-6)
    return F.layer_norm(x, x.shape[-1:], weight, bias, 1e-5)


def _parameters(norm: str, dim: int, torch_dtype: torch.dtype) -> list[list[Tensor]]:
    """Return the sets of parameters to test, as float64 tensors with values that `torch_dtype` can represent."""
    weight, bias = ((torch.randn(dim) + 1).to(torch_dtype).double() for _ in range(2))
    return [[], [weight], [weight, bias]] if norm == "layer" else [[], [weight]]


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_values_and_gradients(rank: int, world_size: int, norm: str, dtype: str) -> None:
    torch_dtype = getattr(torch, dtype)
    for shape, dim in SHAPES:
        torch.manual_seed(1)
        for parameters in _parameters(norm, shape[-1], torch_dtype):
            full = [tensor.clone().requires_grad_() for tensor in parameters]
            # A layer norm of one feature has no variance: rounding errors are multiplied by 1 / sqrt(eps).
            scale = 1e-5**-0.5 if norm == "layer" and shape[-1] == 1 else 1.0
            x, residual = ((torch.randn(shape) * 2 + 1).to(torch_dtype).double().requires_grad_() for _ in range(2))
            grad, grad_sum = (torch.randn(shape).to(torch_dtype).double() for _ in range(2))
            sum_ = x + residual
            y = _reference(norm, sum_, *[*full, None, None][:2])
            torch.autograd.backward([y, sum_], [grad, grad_sum])

            shards = [chunk(tensor.to(torch_dtype), dim, world_size, rank) for tensor in (x, residual)]
            replicas = [tensor.detach().to(torch_dtype).requires_grad_() for tensor in parameters]
            op = weft.ops.add_rms_norm if norm == "rms" else weft.ops.add_layer_norm
            local_y, local_sum = op(*shards, *replicas, group_name=_group())
            _assert_close(local_sum, chunk(sum_, dim, world_size, rank), dtype, "sum")
            grads = [chunk(tensor.to(torch_dtype), dim, world_size, rank).detach() for tensor in (grad, grad_sum)]
            torch.autograd.backward([local_y, local_sum], grads)
            if dtype in ("float64", "float32"):  # a half-precision sum is rounded before it is normalized
                _assert_close(local_y, chunk(y, dim, world_size, rank), dtype, "y")
                for shard, tensor in zip(shards, (x, residual), strict=True):
                    _assert_close(shard.grad, chunk(tensor.grad, dim, world_size, rank), dtype, "shard's grad", scale)
                for replica, tensor in zip(replicas, full, strict=True):
                    _assert_close(replica.grad, tensor.grad, dtype, "grad of a parameter")

            # Without a residual: every dtype against float64 from the same values.
            shard, replicas = (
                shards[0].detach().requires_grad_(),
                [tensor.detach().requires_grad_() for tensor in replicas],
            )
            x, full = x.detach().requires_grad_(), [tensor.detach().requires_grad_() for tensor in full]
            y = _reference(norm, x, *[*full, None, None][:2])
            y.backward(grad)
            local_y = getattr(weft.ops, f"{norm}_norm")(shard, *replicas, group_name=_group())
            assert local_y.dtype is torch_dtype
            local_y.backward(grads[0])
            _assert_close(local_y, chunk(y, dim, world_size, rank), dtype, "y")
            _assert_close(shard.grad, chunk(x.grad, dim, world_size, rank), dtype, "grad x", scale)
            for replica, tensor in zip(replicas, full, strict=True):
                _assert_close(replica.grad, tensor.grad, dtype, "grad of a parameter")


@on_ranks(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float32_parameters_with_half_inputs(rank: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rank)
    x = torch.randn(3, 40, dtype=dtype, requires_grad=True)
    weight, bias = torch.randn(40, requires_grad=True), torch.randn(40, requires_grad=True)
    y = weft.ops.layer_norm(x, weight, bias, group_name="")
    y.float().square().sum().backward()
    grads = [x.grad, weight.grad, bias.grad]
    assert [y.dtype, *(grad.dtype for grad in grads)] == [dtype, dtype, torch.float32, torch.float32]
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, weight, bias)]
    reference = F.layer_norm(exact[0], (40,), *exact[1:])
    reference.backward(2 * y.detach().double())
    torch.testing.assert_close(y.double(), reference, rtol=2**-7, atol=1e-2)
    torch.testing.assert_close(weight.grad.double(), exact[1].grad, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(bias.grad.double(), exact[2].grad, rtol=1e-5, atol=1e-4)


@on_ranks(1)
@pytest.mark.parametrize("norm", ["rms", "layer"])
# The CUDA kernels read packs of 8 elements: of 64 columns; of 8200, too many for the registers of a backward; of 16640,
# too many for those of a forward. Rows of 36 and 700 columns are not multiples of 8 and are read element by element.
@pytest.mark.parametrize("columns", [64, 8200, 16640, 36, 700])
def test_bfloat16_parameters_match_float64(rank: int, norm: str, columns: int) -> None:
    """Models in bfloat16 have these parameters. Results are computed in float32 from stored values and rounded once."""
    torch.manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape).bfloat16().requires_grad_()

    def check(actual: Tensor, expected: Tensor, label: str) -> None:
        assert actual.dtype is torch.bfloat16, label
        expected = expected.detach()
        atol = 2e-5 * expected.abs().max().item()  # float32, and sums that cancel
        actual = actual.detach().double()
        torch.testing.assert_close(actual, expected, rtol=2**-8, atol=atol, msg=lambda text: f"{label}: {text}")

    x, residual = random(3, 2, columns), random(3, 2, columns)
    parameters = [random(columns) for _ in range(2 if norm == "layer" else 1)]
    grad, grad_sum = random(3, 2, columns).detach(), random(3, 2, columns).detach()
    for has_residual in (False, True):
        total = x + residual if has_residual else x
        exact = [tensor.detach().double().requires_grad_() for tensor in (total, *parameters)]
        expected = _reference(norm, exact[0], *[*exact[1:], None][:2])
        torch.autograd.backward([expected, exact[0]], [grad.double(), grad_sum.double() * has_residual])
        if has_residual:
            op = getattr(weft.ops, f"add_{norm}_norm")
            y, sum_ = op(x, residual, *parameters, group_name="")
            assert torch.equal(sum_, total)
            inputs, results, grads = [x, residual], [y, sum_], [grad, grad_sum]
        else:
            y = getattr(weft.ops, f"{norm}_norm")(x, *parameters, group_name="")
            inputs, results, grads = [x], [y], [grad]
        check(y, expected, "y")
        gradients = torch.autograd.grad(results, [*inputs, *parameters], grads)
        for gradient in gradients[: len(inputs)]:
            check(gradient, exact[0].grad, "gradient of an input")
        for gradient, parameter in zip(gradients[len(inputs) :], exact[1:], strict=True):
            check(gradient, parameter.grad, "gradient of a parameter")


def test_large_means_and_strides_match_torch() -> None:
    """The variance is computed about the mean, and strided inputs are supported."""
    x = torch.randn(16, 300) + 4096
    expected = F.layer_norm(x.double(), (300,))
    error = (weft.ops.layer_norm(x, group_name="") - expected).abs().max()
    assert error < 2e-3, error  # x itself is rounded to 2.4e-4
    torch.testing.assert_close(weft.ops.rms_norm(x.t()[:16], group_name=""), F.rms_norm(x.t()[:16], (16,), eps=1e-6))


@on_ranks(2, 4)
def test_number_of_collectives() -> None:
    x, weight, bias = torch.ones(3, 5, requires_grad=True), torch.ones(5, requires_grad=True), torch.ones(5)
    bias.requires_grad_()

    def layer_norm(x: Tensor, *parameters: Tensor) -> Tensor:
        return weft.ops.layer_norm(x, *parameters, group_name=_group())

    y = collectives_of(lambda: layer_norm(x, weight, bias), expected={})
    collectives_of(y.sum().backward, expected={"all_reduce": 1})
    collectives_of(layer_norm(x.detach(), weight, bias.detach()).sum().backward, expected={"all_reduce": 1})
    collectives_of(layer_norm(x, weight.detach(), bias.detach()).sum().backward, expected={})
    collectives_of(layer_norm(x).sum().backward, expected={})
    y, _ = weft.ops.add_rms_norm(x, x, weight, group_name=_group())
    collectives_of(y.sum().backward, expected={"all_reduce": 1})


@on_ranks(2)
def test_saved_bytes(rank: int) -> None:
    """Besides the input or, with a residual, the sum, which is a result, one or two numbers per token are saved."""
    x, weight = torch.randn(64, 256, requires_grad=True), torch.randn(256, requires_grad=True)
    with counted() as count:
        start = count.now()
        y = weft.ops.rms_norm(x, weight, group_name=_group())
        assert count.now() - start == y.nbytes + 64 * 4
        start = count.now()
        z = weft.ops.layer_norm(x, weight, weight, group_name=_group())
        assert count.now() - start == z.nbytes + 2 * 64 * 4
        start = count.now()
        a, b = weft.ops.add_rms_norm(x, x.detach(), weight, group_name=_group())
        assert count.now() - start == a.nbytes + b.nbytes + 64 * 4


def test_changing_saved_sum_raises() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    y, total = weft.ops.add_rms_norm(x, torch.ones(2, 3), group_name="")
    total.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_unused_result_adds_no_gradient() -> None:
    x, residual = torch.randn(2, 3, requires_grad=True), torch.randn(2, 3, requires_grad=True)
    weight = torch.ones(3, requires_grad=True)
    _, total = weft.ops.add_rms_norm(x, residual, weight, group_name="")
    total.sum().backward()
    assert torch.equal(x.grad, torch.ones(2, 3)) and torch.equal(residual.grad, x.grad)
    assert torch.equal(weight.grad, torch.zeros(3))
    x = torch.full((1, 3), float("inf"), requires_grad=True)
    _, total = weft.ops.add_rms_norm(x, residual[:1].detach(), weight, group_name="")
    total.sum().backward()
    assert torch.equal(x.grad, torch.ones(1, 3))  # the norm's gradient at infinity is not added


@on_ranks(2)
def test_errors_leave_group_usable() -> None:
    x, weight, group = torch.ones(2, 4), torch.ones(4), _group()
    for error, text, call in [
        (ValueError, r"weft::rms_norm: got weight of shape \[3\], which must be \[4\]", (x, torch.ones(3))),
        (TypeError, "got weight of dtype Double with x of dtype Float", (x, weight.double())),
        (TypeError, "got x of dtype Long", (x.long(), weight)),
        (ValueError, "got x without dims", (torch.tensor(1.0), weight)),
    ]:
        with pytest.raises(error, match=text):
            weft.ops.rms_norm(*call, group_name=group)
    for eps in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="weft::layer_norm: got eps"):
            weft.ops.layer_norm(x, weight, group_name=group, eps=eps)
    with pytest.raises(ValueError, match="got a bias without a weight"):
        weft.ops.layer_norm(x, None, weight, group_name=group)
    with pytest.raises(TypeError, match="got bias of dtype Float with weight of dtype BFloat16"):
        weft.ops.layer_norm(x.bfloat16(), weight.bfloat16(), weight, group_name=group)
    with pytest.raises(ValueError, match=r"got residual of shape \[4\] with x of shape \[2, 4\]"):
        weft.ops.add_rms_norm(x, weight, group_name=group)
    with pytest.raises(ValueError, match="weft::add_layer_norm: got group_name 'nowhere'"):
        weft.ops.add_layer_norm(x, x, group_name="nowhere")
    leaf = weight.requires_grad_()
    weft.ops.rms_norm(x, leaf, group_name=group).sum().backward()
    torch.testing.assert_close(leaf.grad, torch.full((4,), 4.0))


class Block(nn.Module):
    def __init__(self, group_name: str) -> None:
        super().__init__()
        self.first = weft.nn.RMSNorm(6, group_name=group_name)
        self.second = weft.nn.LayerNorm(6, group_name=group_name)

    def forward(self, x: Tensor) -> Tensor:
        y, total = self.second.add(x, self.first(x))
        z, total = self.first.add(y, total)
        return self.second(z) + total


@on_ranks(1, 2, timeout=300)
def test_compile_export_script_and_autocast(rank: int) -> None:
    block = Block(_group())

    def run(module: nn.Module, tokens: int) -> list[Tensor]:
        block.zero_grad(set_to_none=True)
        x = (torch.arange(tokens * 12.0).reshape(2, tokens, 6) + rank).sin().requires_grad_()
        y = module(x)
        y.square().sum().backward()
        return [y.detach(), x.grad, *(p.grad.clone() for p in block.parameters())]

    eager = {tokens: run(block, tokens) for tokens in (3, 5)}
    for backend, dynamic in [("aot_eager", False), ("aot_eager", True), ("inductor", True)]:
        torch._dynamo.reset()
        compiled = torch.compile(block, fullgraph=True, backend=backend, dynamic=dynamic)
        for tokens in eager if dynamic else (3,):
            for actual, expected in zip(run(compiled, tokens), eager[tokens], strict=True):
                torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    program = torch.export.export(block, (torch.ones(2, 4, 6),), dynamic_shapes=({1: torch.export.Dim("s", min=2)},))
    targets = [str(node.target) for node in program.graph.nodes]
    assert [targets.count(f"weft.{name}.default") for name in ("rms_norm", "layer_norm", "add_rms_norm")] == [1, 1, 1]
    torch.testing.assert_close(program.module()(torch.ones(2, 5, 6)), block(torch.ones(2, 5, 6)))
    scripted = torch.jit.script(block)
    for _ in range(3):
        torch.testing.assert_close(run(scripted, 3), eager[3])
    buffer = io.BytesIO()
    torch.jit.save(scripted, buffer)
    buffer.seek(0)
    loaded = torch.jit.load(buffer)
    assert weft.nn.rebind_group(loaded, dist.new_group().group_name) == 2
    torch.testing.assert_close(loaded(torch.ones(2, 3, 6)), block(torch.ones(2, 3, 6)))
    with autocast(torch.bfloat16):
        y, total = block.second.add(torch.ones(2, 6, dtype=torch.bfloat16), torch.ones(2, 6))
        assert y.dtype is torch.float32 and total.dtype is torch.float32
        assert block.first(torch.ones(2, 6, dtype=torch.bfloat16)).dtype is torch.bfloat16
