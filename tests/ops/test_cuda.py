"""Values and gradients of the operators on a CUDA device match the CPU in float64, on a group of one rank.

test_cuda_ranks.py tests 2 ranks.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import weft
from ops.operators import Call, sample_calls
from support.ranks import on_ranks

pytestmark = pytest.mark.cuda
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 6e-3}


def _moved(call: Call, device: str, dtype: torch.dtype) -> Call:
    def move(arg: object) -> object:
        if not isinstance(arg, Tensor):
            return arg
        if not arg.is_floating_point():
            return arg if call.name == "dropout" else arg.to(device)  # dropout reads its seed on the CPU
        return arg.detach().to(device, dtype).requires_grad_()

    return Call(call.name, tuple(move(arg) for arg in call.args), call.kwargs)


def _run(call: Call) -> list[Tensor]:
    """Return results with gradients, and gradients; the results' gradients are small integers, exact in every dtype."""
    y = call.op(*call.args, **call.kwargs)
    results = [result for result in ([y] if isinstance(y, Tensor) else y) if result.requires_grad]
    leaves = [arg for arg in call.args if isinstance(arg, Tensor) and arg.requires_grad]
    grads = [(torch.arange(result.numel()) % 5 - 2).reshape(result.shape).to(result) for result in results]
    return [*(result.detach() for result in results), *torch.autograd.grad(results, leaves, grads)]


def _check(call: Call, dtype: torch.dtype) -> None:
    rounded = _moved(_moved(call, "cpu", dtype), "cpu", torch.float64)
    expected = _run(rounded)
    actual = _run(_moved(rounded, "cuda", dtype))
    is_loss = "cross_entropy" in call.name and dtype is not torch.float64
    assert actual[0].dtype is (torch.float32 if is_loss else dtype)
    assert all(gradient.dtype is dtype for gradient in actual[1:])
    for a, b in zip(actual, expected, strict=True):
        assert a.is_cuda
        error = (a.double().cpu() - b).abs().max().item()
        assert error <= TOLERANCE[dtype] * max(1.0, b.abs().max().item())


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("index", range(len(sample_calls())))
def test_matches_cpu(index: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    _check(sample_calls()[index], dtype)


@on_ranks(1)
def test_nccl_group_of_one_rank_matches_cpu() -> None:
    """The operators resolve the group, but have nothing to communicate."""
    group = dist.new_group(backend="cpu:weft,cuda:nccl")
    total = torch.ones(1, device="cuda")
    dist.all_reduce(total, group=group)
    assert total.item() == 1
    for call in sample_calls(group.group_name):
        _check(call, torch.float64)


def test_mixed_devices_raise() -> None:
    x, w = torch.ones(2, 4, device="cuda"), torch.ones(3, 4)
    with pytest.raises(ValueError, match=r"got weight on cpu with x on cuda:0; move them to one device"):
        torch.ops.weft.column_linear(x, w, group_name="")


@pytest.mark.gpu("inductor compiles kernels with Triton")
def test_compiled_mlp_matches_eager_on_cuda() -> None:
    mlp = weft.nn.ColumnRowMLP(64, 96, group_name="", device=torch.device("cuda"))
    x = torch.randn(8, 64, device="cuda")
    torch.testing.assert_close(torch.compile(mlp, fullgraph=True)(x), mlp(x), rtol=1e-4, atol=1e-4)
