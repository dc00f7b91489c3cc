"""Optimizer states off the device: the bits of steps on CPU copies, no device memory, and copies in the right order."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from support import cuda_runtime
from weft.strategy import StepInBackward, fuse, offload_states
from weft.strategy.optimizers.host_steps import HostSteps
from weft.strategy.optimizers.state_format import StateFormat
from weft.strategy.optimizers.use_low_precision import use_low_precision

pytestmark = pytest.mark.cuda

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adam": lambda p: Adam(p, lr=1e-2, weight_decay=0.1, amsgrad=True),
    "adamw": lambda p: AdamW(p, lr=1e-2),
    "momentum": lambda p: SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adagrad": lambda p: Adagrad(p, lr=1e-2),
}
LOW_PRECISION = {
    "adamw int8": ("adamw", StateFormat("int8", "float32")),
    "momentum split8": ("momentum", StateFormat("bfloat16", "split8")),
}
NUM_STEPS = 3


def _layers() -> nn.Module:
    torch.manual_seed(3)
    # Gradients of equal sizes: the memory of one is the next one's if it is freed too early.
    middle = (layer for _ in range(3) for layer in (nn.Linear(256, 256), nn.GELU()))
    return nn.Sequential(nn.Linear(96, 256), nn.GELU(), *middle, nn.Linear(256, 40))


def _optimizer(name: str, model: nn.Module) -> Optimizer:
    base, state_format = LOW_PRECISION.get(name, (name, None))
    optimizer = OPTIMIZERS[base](model.parameters())
    if state_format is not None:
        use_low_precision(optimizer, model, state_format)
    elif name != "adagrad":  # which has fused kernels on the CPU only
        fuse(optimizer, model)
    return optimizer


def _forward(model: nn.Module, step: int) -> Tensor:
    x = torch.randn(8, 96, generator=torch.Generator().manual_seed(step)).cuda()
    is_split = any(parameter.dtype == torch.bfloat16 for parameter in model.parameters())
    with torch.autocast("cuda", torch.bfloat16, enabled=is_split):
        return model(x).float().square().mean()


def _step_beside(model: nn.Module, optimizer: Optimizer, oracle: nn.Module, expected: Optimizer, step: int) -> None:
    """Make a step of a model on CUDA, and one of its copy on the CPU with the same gradients."""
    _forward(model, step).backward()
    for parameter, wanted in zip(model.parameters(), oracle.parameters(), strict=True):
        wanted.grad = parameter.grad.cpu()
    expected.step()
    optimizer.step()
    optimizer.zero_grad()


def _assert_equal(model: nn.Module, optimizer: Optimizer, oracle: nn.Module, expected: Optimizer, message: str) -> None:
    for parameter, wanted in zip(model.parameters(), oracle.parameters(), strict=True):
        assert torch.equal(parameter.cpu(), wanted), message
        states, wanted_states = optimizer.state[parameter], expected.state[wanted]
        assert states.keys() == wanted_states.keys(), message
        for name, value in wanted_states.items():
            assert states[name].device.type == "cpu" and torch.equal(states[name], value), f"{message}: {name}"


@pytest.mark.parametrize("name", [*OPTIMIZERS, *LOW_PRECISION])
@pytest.mark.parametrize("target", ["cpu", "disk"])
def test_steps_have_the_bits_of_steps_on_the_cpu(tmp_path: Path, name: str, target: str) -> None:
    """Steps, a state that is loaded, and more steps; nothing but weights and gradients is on the device."""
    before = torch.cuda.memory_allocated()
    model, oracle = _layers().cuda(), _layers()
    optimizer, expected = _optimizer(name, model), _optimizer(name, oracle)
    offload_states(optimizer, target if target == "cpu" else f"disk:{tmp_path}")
    for step in range(NUM_STEPS):
        _step_beside(model, optimizer, oracle, expected, step)
    _assert_equal(model, optimizer, oracle, expected, "steps")
    saved = copy.deepcopy(expected.state_dict())
    weights = copy.deepcopy(oracle.state_dict())
    low_bits = [copy.deepcopy(expected.state[p].get("low_bits")) for p in oracle.parameters()]
    for step in range(NUM_STEPS, NUM_STEPS + 2):
        _step_beside(model, optimizer, oracle, expected, step)

    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    optimizer.load_state_dict(saved)
    expected.load_state_dict(copy.deepcopy(saved))  # torch keeps the tensors themselves
    assert torch.cuda.max_memory_allocated() == held, "loading states takes no device memory"
    for own in (model, oracle):
        own.load_state_dict(weights)
    for loaded, own in ((optimizer, model), (expected, oracle)):
        for parameter, low in zip(own.parameters(), low_bits, strict=True):
            if low is not None:
                loaded.state[parameter]["low_bits"].copy_(low)
    _assert_equal(model, optimizer, oracle, expected, "loading")
    for step in range(2 * NUM_STEPS, 3 * NUM_STEPS):
        _step_beside(model, optimizer, oracle, expected, step)
    _assert_equal(model, optimizer, oracle, expected, "later steps")
    torch.cuda.synchronize()
    of_weights = sum(-(-parameter.nbytes // 512) * 512 for parameter in model.parameters())  # the allocator's rounding
    assert torch.cuda.memory_allocated() - before <= of_weights


@pytest.mark.parametrize("delay_ms", [0, 5])
def test_steps_in_the_backward(delay_ms: int) -> None:
    """With steps that go on during the backward, and gradients freed there, the weights are those of steps after it."""
    results = []
    for is_in_backward in (False, True):
        model = _layers().cuda()
        optimizer = _optimizer("adamw", model)
        offload_states(optimizer, "cpu")
        if is_in_backward:
            StepInBackward(model, optimizer)
        with cuda_runtime.delay(delay_ms) if cuda_runtime.is_active() else contextlib.nullcontext():
            for step in range(NUM_STEPS):
                _forward(model, step).backward()
                assert all((parameter.grad is None) == is_in_backward for parameter in model.parameters())
                optimizer.step()
                optimizer.zero_grad()
        results.append([parameter.detach().cpu() for parameter in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_errors_of_the_thread_are_raised() -> None:
    model = _layers().cuda()
    optimizer = _optimizer("adamw", model)
    offload_states(optimizer, "cpu")
    StepInBackward(model, optimizer)
    error = ArithmeticError("of the thread")
    with mock.patch.object(torch, "_fused_adamw_", side_effect=error), pytest.raises(ArithmeticError, match="thread"):
        _forward(model, 0).backward()
        optimizer.step()


def test_a_gradient_may_be_freed_before_its_copy_has_run() -> None:
    is_released = threading.Event()

    def step(twin: Tensor) -> None:
        is_released.wait(60)
        twin.sub_(twin.grad)

    host = HostSteps()
    weights = [torch.full((1 << 16,), 5.0, device="cuda") for _ in range(2)]
    gradients = [torch.full_like(weight, idx + 1.0) for idx, weight in enumerate(weights)]
    torch.cuda.synchronize()
    with cuda_runtime.delay(60_000) if cuda_runtime.is_active() else contextlib.nullcontext():
        while gradients:  # the thread does not wait for the second copies before it has made the first step
            host.submit(weights[len(gradients) - 1], gradients.pop(), step)
        others = [torch.full_like(weights[0], 100.0) for _ in range(2)]
        torch.cuda.current_stream().synchronize()
        is_released.set()
        host.wait()
        assert [weight.tolist() == [4.0 - idx] * (1 << 16) for idx, weight in enumerate(weights)] == [True, True]
    del others
