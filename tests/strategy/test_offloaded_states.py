"""Optimizer states elsewhere: the same bits as in memory, in every way to step and to load; no memory on a disk."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from support.processes import run_process
from support.ranks import on_ranks
from weft.strategy import StepInBackward, fuse, offload_states
from weft.strategy.data_parallel.local import local_shard
from weft.strategy.optimizers.state_file import StateFile
from weft.strategy.optimizers.state_format import StateFormat
from weft.strategy.optimizers.use_low_precision import use_low_precision

OPTIMIZERS: dict[str, Any] = {
    "adam": lambda p: Adam(p, lr=1e-2, weight_decay=0.1),
    "amsgrad": lambda p: Adam(p, lr=1e-2, amsgrad=True),
    "adamw": lambda p: AdamW(p, lr=1e-2),
    "momentum": lambda p: SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "dampening": lambda p: SGD(p, lr=0.05, momentum=0.9, dampening=0.1, maximize=True),
    "adagrad": lambda p: Adagrad(p, lr=1e-2),
}
LOW_PRECISION = {
    "adamw int8": ("adamw", StateFormat("int8", "float32")),
    "momentum int8": ("momentum", StateFormat("int8", "float32")),
    "adam split8": ("adam", StateFormat("bfloat16", "split8")),
}
NUM_STEPS = 3


class Layers(nn.Module):
    """A large weight, one in another memory format, one that is frozen at first, and a small bias."""

    def __init__(self, memory_format: torch.memory_format) -> None:
        super().__init__()
        self.first = nn.Linear(192, 512)
        self.image = nn.Conv2d(32, 64, 4).to(memory_format=memory_format)
        self.last = nn.Linear(512, 80, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        pixels = self.first(x).reshape(len(x), 32, 4, 4)
        return self.last(self.image(pixels).flatten(1).repeat(1, 8))


def _layers(memory_format: torch.memory_format = torch.channels_last) -> Layers:
    torch.manual_seed(3)
    return Layers(memory_format)


def _optimizer(name: str, model: nn.Module) -> Optimizer:
    base, state_format = LOW_PRECISION.get(name, (name, None))
    optimizer: Optimizer = OPTIMIZERS[base](model.parameters())
    if state_format is not None:
        use_low_precision(optimizer, model, state_format)
    else:
        fuse(optimizer, model)
    return optimizer


def _train(model: nn.Module, optimizer: Optimizer, first_step: int = 0) -> None:
    for step in range(first_step, first_step + NUM_STEPS):
        generator = torch.Generator().manual_seed(step)
        is_split = any(parameter.dtype == torch.bfloat16 for parameter in model.parameters())
        with torch.autocast("cpu", torch.bfloat16, enabled=is_split):
            y = model(torch.randn(4, 192, generator=generator))
        y.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _assert_equal(optimizer: Optimizer, expected: Optimizer, message: str) -> None:
    pairs = zip(_parameters(optimizer), _parameters(expected), strict=True)
    for idx, (parameter, wanted) in enumerate(pairs):
        assert torch.equal(_bits(parameter), _bits(wanted)), f"{message}: parameter {idx}"
        states, wanted_states = optimizer.state[parameter], expected.state[wanted]
        assert states.keys() == wanted_states.keys(), f"{message}: parameter {idx}"
        for name, value in wanted_states.items():
            assert torch.equal(_bits(states[name]), _bits(value)), f"{message}: {name} of parameter {idx}"


def _bits(value: Tensor) -> Tensor:
    return value.detach().contiguous().reshape(-1).view(torch.uint8)  # zeros of both signs differ


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _assert_mapped(optimizer: Optimizer, directory: Path) -> None:
    """All states of at least 64 KiB are in files of the directory."""
    ranges = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if f" {directory}/" in line:
            begin, end = (int(address, 16) for address in line.split()[0].split("-"))
            ranges.append((begin, end))
    num_mapped = 0
    for states in optimizer.state.values():
        for name, value in states.items():
            local = local_shard(value)
            is_mapped = any(begin <= local.data_ptr() < end for begin, end in ranges)
            assert is_mapped == (local.nbytes >= 64 << 10), f"{name} {list(local.shape)}"
            num_mapped += is_mapped
    assert num_mapped


@pytest.mark.parametrize("target", ["cpu", "disk"])
@pytest.mark.parametrize("name", [*OPTIMIZERS, *LOW_PRECISION])
def test_steps_have_the_bits_of_steps_in_memory(tmp_path: Path, name: str, target: str) -> None:
    """Usual steps, then a loaded state, then steps in the backward; "cpu": on copies of the weights, in a thread."""
    assert_mapped = _assert_mapped if target == "disk" else (lambda *_: None)
    # Low-precision variants raise for weights in other memory formats.
    memory_format = torch.contiguous_format if name in LOW_PRECISION else torch.channels_last
    expected_model, model = _layers(memory_format), _layers(memory_format)
    expected, optimizer = _optimizer(name, expected_model), _optimizer(name, model)
    before = optimizer
    offload_states(optimizer, "cpu" if target == "cpu" else f"disk:{tmp_path}/new")
    assert optimizer is before and isinstance(optimizer, type(expected)) and not list(tmp_path.glob("new/*"))
    _train(expected_model, expected)
    _train(model, optimizer)
    _assert_equal(optimizer, expected, "steps")
    assert_mapped(optimizer, tmp_path)

    saved = copy.deepcopy(expected.state_dict())
    _train(model, optimizer, NUM_STEPS)
    optimizer.load_state_dict(saved)
    model.load_state_dict(expected_model.state_dict())
    for parameter, wanted in zip(_parameters(optimizer), _parameters(expected), strict=True):
        if "low_bits" in expected.state[wanted]:  # a model's state has the upper bits only
            optimizer.state[parameter]["low_bits"].copy_(expected.state[wanted]["low_bits"])
    _assert_equal(optimizer, expected, "loading")
    assert_mapped(optimizer, tmp_path)

    if name != "adagrad":
        StepInBackward(model, optimizer)
        StepInBackward(expected_model, expected)
    _train(expected_model, expected, 2 * NUM_STEPS)
    _train(model, optimizer, 2 * NUM_STEPS)
    _assert_equal(optimizer, expected, "steps in the backward" if name != "adagrad" else "more steps")
    assert_mapped(optimizer, tmp_path)


def test_trained_states_frozen_parameters_and_new_groups_move(tmp_path: Path) -> None:
    """An optimizer that has made steps; a parameter that is trained later; a group that is added; copies."""
    results = []
    for is_offloaded in (False, True):
        model = _layers()
        model.image.requires_grad_(False)
        optimizer = AdamW([*model.first.parameters(), *model.image.parameters()], lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        _train(model, optimizer)
        schedule.step()
        if is_offloaded:
            offload_states(optimizer, f"disk:{tmp_path}")
            _assert_mapped(optimizer, tmp_path)
        optimizer.add_param_group({"params": model.last.parameters(), "lr": 1e-3})
        model.image.requires_grad_(True)
        _train(model, optimizer, NUM_STEPS)
        schedule.step()
        results.append((optimizer, copy.deepcopy((model, optimizer))))
    _assert_equal(results[1][0], results[0][0], "later steps")
    _assert_mapped(results[1][0], tmp_path)
    for _, (model, optimizer) in results:
        _train(model, optimizer, 2 * NUM_STEPS)
    _assert_equal(results[1][1][1], results[0][1][1], "copies")
    _assert_mapped(results[1][1][1], tmp_path)


def test_earlier_state_dicts_keep_their_values(tmp_path: Path) -> None:
    """As with torch's classes, loading and new states after `state.clear()` write to other memory."""
    results = []
    for is_offloaded in (False, True):
        model = _layers()
        optimizer = _optimizer("adamw", model)
        if is_offloaded:
            offload_states(optimizer, f"disk:{tmp_path}")
        _train(model, optimizer)
        saved = optimizer.state_dict()
        copied = copy.deepcopy(saved)
        optimizer.load_state_dict(copied)
        _train(model, optimizer)  # with the states that were loaded
        first, last = (copy.deepcopy(saved["state"][idx]) for idx in (0, 0))
        exchanged = {**saved, "state": {**saved["state"], 0: {**first, "exp_avg": last["exp_avg_sq"]}}}
        optimizer.load_state_dict(exchanged)
        optimizer.state.clear()
        _train(model, optimizer)
        optimizer.load_state_dict(saved)
        own = optimizer.state_dict()
        states = {**own["state"][0], "exp_avg": own["state"][0]["exp_avg_sq"], "exp_avg_sq": own["state"][0]["exp_avg"]}
        optimizer.load_state_dict({**own, "state": {**own["state"], 0: states}})
        _train(model, optimizer)
        results.append(optimizer)
    _assert_equal(results[1], results[0], "loading")
    _assert_mapped(results[1], tmp_path)


def test_a_stepper_that_exists_steps_states_on_the_disk(tmp_path: Path) -> None:
    expected_model, model = _layers(), _layers()
    expected, optimizer = _optimizer("adamw", expected_model), _optimizer("adamw", model)
    StepInBackward(model, optimizer)
    StepInBackward(expected_model, expected)
    offload_states(optimizer, f"disk:{tmp_path}")
    _train(expected_model, expected)
    _train(model, optimizer)
    _assert_equal(optimizer, expected, "steps in the backward")
    _assert_mapped(optimizer, tmp_path)


def test_late_parameters_take_few_files(tmp_path: Path) -> None:
    """40 parameters that are trained later; groups that are replaced; an optimizer that is pickled."""
    weights = [nn.Parameter(torch.randn(128, 129), requires_grad=idx == 0) for idx in range(41)]
    optimizer = Adagrad(weights, lr=0.1, initial_accumulator_value=0.3)
    del optimizer.state[weights[0]]
    offload_states(optimizer, f"disk:{tmp_path}")
    before = len(os.listdir("/proc/self/fd"))
    for weight in weights:
        weight.requires_grad_()
        weight.grad = torch.ones_like(weight)
    copied = pickle.loads(pickle.dumps(optimizer))
    optimizer.step()
    assert len(os.listdir("/proc/self/fd")) <= before + 4
    _assert_mapped(optimizer, tmp_path)
    for parameter in _parameters(copied):
        parameter.grad = torch.ones_like(parameter)
    copied.step()
    _assert_equal(copied, optimizer, "pickled")
    _assert_mapped(copied, tmp_path)
    during = len(os.listdir("/proc/self/fd"))
    del weights, weight
    for _ in range(3):
        optimizer.param_groups[0]["params"] = [nn.Parameter(torch.zeros(128, 129))]
        optimizer.state.clear()
        optimizer.param_groups[0]["params"][0].grad = torch.ones(128, 129)
        optimizer.step()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= during


def test_sparse_gradients(tmp_path: Path) -> None:
    results = []
    for target in (None, f"disk:{tmp_path}", "cpu"):
        torch.manual_seed(0)
        table = nn.Embedding(400, 64, sparse=True)
        optimizer = SGD(table.parameters(), lr=0.1, momentum=0.9, nesterov=True)
        if target is not None:
            offload_states(optimizer, target)
        for step in range(5):
            table(torch.tensor([1, 5 + step, 1])).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 2:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        results.append(table.weight)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("name", ["adamw", "momentum"])
def test_steps_of_hooks_of_the_user(name: str) -> None:
    """An optimizer for each parameter, stepped by a hook in the backward, as torch's tutorial does it."""
    results = []
    for is_offloaded in (False, True):
        model = _layers()
        optimizers = {parameter: OPTIMIZERS[name]([parameter]) for parameter in model.parameters()}
        for optimizer in optimizers.values():
            if is_offloaded:
                offload_states(optimizer, "cpu")

        def step(parameter: Tensor, optimizers: dict[Tensor, Optimizer] = optimizers) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        for seed in range(NUM_STEPS):
            generator = torch.Generator().manual_seed(seed)
            model(torch.randn(4, 192, generator=generator)).square().mean().backward()
        results.append(list(optimizers.values()))
    for optimizer, expected in zip(*reversed(results), strict=True):
        _assert_equal(optimizer, expected, "hooks")


@pytest.mark.parametrize("target", [None, "cpu", "disk"])
@pytest.mark.parametrize("is_in_backward", [False, True])
def test_hooks_run_once_for_each_step(tmp_path: Path, target: str | None, is_in_backward: bool) -> None:
    """Not for each parameter, nor twice because a low-precision class is derived from another one."""
    for name in ("adamw", "adamw int8", "momentum int8"):
        model = _layers(torch.contiguous_format)
        optimizer = _optimizer(name, model)
        if target is not None:
            offload_states(optimizer, "cpu" if target == "cpu" else f"disk:{tmp_path}")
        if is_in_backward:
            StepInBackward(model, optimizer)
        calls: list[str] = []
        optimizer.register_step_pre_hook(lambda *_, calls=calls: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_, calls=calls: calls.append("after"))
        _train(model, optimizer)
        assert calls == ["before", "after"] * NUM_STEPS, name


def test_states_are_complete_between_backward_and_step() -> None:
    model = _layers()
    optimizer = _optimizer("momentum", model)
    offload_states(optimizer, "cpu")
    StepInBackward(model, optimizer)
    model(torch.randn(4, 192)).square().mean().backward()
    assert [state.keys() for state in optimizer.state_dict()["state"].values()] == [{"momentum_buffer"}] * 5


def test_all_steps_end_if_one_fails() -> None:
    """The error of the first step is raised after the second one, whose weight and state are complete."""
    weights = [nn.Parameter(torch.zeros(1000, 10)) for _ in range(2)]
    optimizer = SGD(weights, lr=1.0, momentum=0.9)
    offload_states(optimizer, "cpu")
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    steps = iter([ArithmeticError("first"), None])
    original = SGD.step

    def step(self: SGD, closure: Any = None) -> Any:
        error = next(steps)
        time.sleep(0.05)
        if error is not None:
            raise error
        return original.__wrapped__(self)

    with mock.patch.object(SGD, "step", step), pytest.raises(ArithmeticError, match="first"):
        optimizer.step()
    assert weights[0].eq(0).all() and weights[1].eq(-1).all()
    assert list(optimizer.state[weights[1]]) == ["momentum_buffer"]


@on_ranks(2, keeps_groups=True)
def test_shards_have_the_bits_of_shards_in_memory(rank: int, world_size: int) -> None:
    mesh = dist.init_device_mesh("cpu", (world_size,))
    generator = torch.Generator().manual_seed(0)
    value, gradient = (torch.randn(70, 2048, generator=generator) for _ in range(2))
    directory = Path(f"/tmp/weft-states-{os.getpid()}")
    for name in ("adamw", "momentum", "adamw int8", "adam split8"):
        for dim in (0, 1):
            found = []
            for is_offloaded in (False, True):
                weights = nn.ParameterList([nn.Parameter(distribute_tensor(value.clone(), mesh, [Shard(dim)]))])
                optimizer = _optimizer(name, weights)
                if is_offloaded:
                    offload_states(optimizer, f"disk:{directory}")
                for _ in range(NUM_STEPS):
                    weights[0].grad = distribute_tensor(gradient, mesh, [Shard(dim)]).to(weights[0].dtype)
                    optimizer.step()
                found.append(optimizer)
            _assert_mapped(found[1], directory)
            expected, got = (optimizer.state[_parameters(optimizer)[0]] for optimizer in found)
            for key, wanted in expected.items():
                assert isinstance(got[key], DTensor) == isinstance(wanted, DTensor)
                assert torch.equal(local_shard(got[key]), local_shard(wanted)), f"{name} {dim} {key}"
                assert getattr(got[key], "placements", None) == getattr(wanted, "placements", None)
            assert torch.equal(*(local_shard(_parameters(optimizer)[0]) for optimizer in found))
    directory.rmdir()  # files have no names


@on_ranks(2, keeps_groups=True)
def test_gradients_with_other_placements(rank: int, world_size: int) -> None:
    """A sharded weight with a replicated gradient; a weight that is frozen after its backward."""
    mesh = dist.init_device_mesh("cpu", (world_size,))
    found = []
    for is_offloaded in (False, True):
        weight = nn.Parameter(distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)]))
        optimizer = AdamW([weight], lr=0.1)
        if is_offloaded:
            offload_states(optimizer, "cpu")
        for step in range(2):
            weight.grad = distribute_tensor(torch.arange(24.0).reshape(6, 4) - step, mesh, [Replicate()])
            weight.requires_grad_(step == 0)
            optimizer.step()
        assert isinstance(optimizer.state[weight]["exp_avg"], DTensor)
        found.append(local_shard(weight))
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=1e-7)


RESIDENT = """
import pathlib, sys, torch, weft
from torch import nn
from weft.strategy import StepInBackward, fuse, offload_states

def kilobytes(field):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))

weft.memory.track()
is_in_backward = sys.argv[2] == "in_backward"
model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(16)))  # 64 MiB
optimizer = torch.optim.AdamW(model.parameters())
fuse(optimizer, model)
x = torch.randn(4, 1024)
model(x).square().sum().backward()
optimizer.zero_grad()
pathlib.Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
before = kilobytes("RssAnon"), kilobytes("RssFile"), kilobytes("VmHWM")
offload_states(optimizer, f"disk:{sys.argv[1]}")
if is_in_backward:
    StepInBackward(model, optimizer)
for _ in range(3):
    model(x).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
states = sum(s.nbytes for states in optimizer.state.values() for s in states.values() if s.dim())
watch = weft.memory.by_category()
growth = [kilobytes(field) - size for field, size in zip(("RssAnon", "RssFile", "VmHWM"), before)]
print(*growth, states, sum(watch.values()))
"""


@pytest.mark.parametrize("kind", ["usual", "in_backward"])
def test_states_take_no_memory(tmp_path: Path, kind: str) -> None:
    """128 MiB of states of a model of 64 MiB: neither anonymous memory nor resident pages of files nor counted."""
    environment = {"MALLOC_MMAP_THRESHOLD_": "131072"}  # so that freed tensors leave the process
    result = run_process([sys.executable, "-c", RESIDENT, str(tmp_path), kind], env=environment, timeout=100)
    assert result.returncode == 0, result.stderr
    anonymous, of_files, peak, states, counted = map(int, result.stdout.split())
    assert states == 128 << 20
    assert peak < (48 << 10) + (64 << 10 if kind == "usual" else 0)  # with gradients, if they exist all at once
    assert anonymous < 32 << 10 and of_files < 32 << 10  # KiB
    assert 64 << 20 <= counted < 70 << 20


INVALID = {
    "RMSprop": (
        RMSprop,
        "an optimizer of class RMSprop, and only Adam, AdamW, SGD, Adagrad and what `fuse` makes",
    ),
    "no momentum": (lambda p: SGD(p, lr=1.0), "SGD without momentum, which has no states"),
    "differentiable": (lambda p: Adam(p, differentiable=True), "Adam with differentiable=True"),
}


@pytest.mark.parametrize("kind", INVALID)
def test_other_optimizers_raise(tmp_path: Path, kind: str) -> None:
    make, reason = INVALID[kind]
    optimizer = make(nn.Linear(2, 2).parameters())
    with pytest.raises(ValueError, match=f"got {reason}.*; pass another optimizer, or leave"):
        offload_states(optimizer, f"disk:{tmp_path}")
    assert type(optimizer).__name__ in ("RMSprop", "SGD", "Adam")


def test_groups_that_do_not_fit_raise(tmp_path: Path) -> None:
    optimizer = Adam(nn.Linear(2, 2).parameters())
    offload_states(optimizer, f"disk:{tmp_path}")
    with pytest.raises(ValueError, match="got Adam with differentiable=True; pass another optimizer"):
        optimizer.add_param_group({"params": nn.Linear(2, 2).parameters(), "differentiable": True})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(ValueError, match="whose states are offloaded already; call offload_states once"):
        offload_states(optimizer, f"disk:{tmp_path}")


def test_targets_and_full_disks_raise(tmp_path: Path) -> None:
    optimizer = Adam(nn.Linear(2, 2).parameters())
    for target in ("gpu", "disk:", "/scratch"):
        with pytest.raises(ValueError, match=rf"got '{target}' for optimizer states; pass 'cpu', or 'disk:' and a di"):
            offload_states(optimizer, target)
    with pytest.raises(OSError, match=r"need 1152921504606846976 bytes in .* free bytes .*; pass a directory"):
        StateFile(tmp_path, 1 << 60)
    (tmp_path / "file").touch()
    large = Adam(nn.Linear(256, 256).parameters())
    with pytest.raises(FileExistsError, match=r"the directory '.*/file' for optimizer states cannot be written to"):
        offload_states(large, f"disk:{tmp_path}/file")
    assert type(large) is Adam
    offload_states(large, f"disk:{tmp_path}/directory")  # the optimizer is as before
    assert isinstance(large, Adam) and type(large) is not Adam
