"""How the operators use streams, devices and graphs, on the runtime without a device."""

from __future__ import annotations

import pytest
import torch
from ops.operators import READS_COUNTS, Call, sample_calls
from torch import Tensor

from support import cuda_runtime

pytestmark = pytest.mark.cuda_runtime
CALLS = range(len(sample_calls()))
DROPOUTS = [index for index in CALLS if sample_calls()[index].name == "dropout"]
NEVER_WAIT = [index for index in CALLS if sample_calls()[index].name not in READS_COUNTS]
PATIENT_MS = 20_000  # so long that work begins only if the host or another stream needs it


def _on_cuda(call: Call, device: str = "cuda:0") -> Call:
    def move(arg: object) -> object:
        if not isinstance(arg, Tensor) or (call.name == "dropout" and not arg.is_floating_point()):
            return arg  # the seed of dropout is read on the CPU
        moved = arg.detach().to(device)
        return moved.requires_grad_() if arg.requires_grad else moved

    return Call(call.name, tuple(move(arg) for arg in call.args), call.kwargs)


def _sample(index: int, device: str = "cuda:0") -> Call:
    torch.manual_seed(0)
    return _on_cuda(sample_calls()[index], device)


def _run(call: Call) -> list[Tensor]:
    """Return results that have gradients, and the gradients."""
    y = call.op(*call.args, **call.kwargs)
    results = [result for result in ([y] if isinstance(y, Tensor) else y) if result.requires_grad]
    leaves = [arg for arg in call.args if isinstance(arg, Tensor) and arg.requires_grad]
    gradients = torch.autograd.grad(results, leaves, [torch.ones_like(result) for result in results])
    return [*(result.detach() for result in results), *gradients]


def _on_host(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.cpu() for tensor in tensors]


@pytest.mark.parametrize("index", NEVER_WAIT)
def test_host_never_waits(index: int) -> None:
    call = _sample(index)
    _run(call)
    before = cuda_runtime.count("synchronizations")
    _run(call)
    assert cuda_runtime.count("synchronizations") == before


@pytest.mark.parametrize("index", CALLS)
def test_work_is_on_the_current_stream(index: int) -> None:
    """The inputs are computed on a side stream, so that work on another stream would read them too early."""
    expected = _on_host(_run(_sample(index)))
    side = torch.cuda.Stream()
    with torch.cuda.stream(side), cuda_runtime.delay(PATIENT_MS):
        actual = _run(_sample(index))
        side.synchronize()
        for a, b in zip(_on_host(actual), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("index", CALLS)
def test_work_is_on_the_device_of_the_tensors(index: int) -> None:
    expected = _on_host(_run(_sample(index)))
    assert torch.cuda.current_device() == 0
    actual = _run(_sample(index, "cuda:1"))
    assert all(tensor.device == torch.device("cuda:1") for tensor in actual)
    assert torch.cuda.current_device() == 0
    for a, b in zip(_on_host(actual), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("index", [index for index in NEVER_WAIT if index not in DROPOUTS])
def test_graph_replays_forward_and_backward(index: int) -> None:
    call = _sample(index)
    expected = _on_host(_run(call))
    leaves = [arg for arg in call.args if isinstance(arg, Tensor) and arg.requires_grad]
    values = [leaf.detach().clone() for leaf in leaves]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = _run(call)
    with torch.no_grad():
        for leaf in leaves:
            leaf.zero_()
    graph.replay()
    with_zeros = _on_host(captured)
    with torch.no_grad():
        for leaf, value in zip(leaves, values, strict=True):
            leaf.copy_(value)
    graph.replay()
    for a, b in zip(_on_host(captured), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert any(not torch.equal(a, b) for a, b in zip(with_zeros, expected, strict=True))


def test_dropout_in_a_capture_raises() -> None:
    call, graph = _sample(DROPOUTS[0]), torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="capture"), torch.cuda.graph(graph):
        _run(call)
