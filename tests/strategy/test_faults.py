"""weft.strategy.faults without the plugin: hashes, comparisons of any mesh, and values that are not finite."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import xxhash
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from support.ranks import on_ranks
from weft.strategy.faults import (
    Difference,
    ModuleWatch,
    Replica,
    are_finite,
    compare_replicas,
    hash_of,
    largest_values,
    replicas,
    training_state,
)

CPU = torch.device("cpu")
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.int32, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES)
def test_hash_is_that_of_the_bytes(dtype: torch.dtype, monkeypatch: Any) -> None:
    monkeypatch.setattr(replicas, "_PART_BYTES", 64)  # several parts
    values = torch.arange(60).reshape(5, 12).to(dtype)
    content = f"{dtype} (5, 12)".encode() + bytes(values.contiguous().view(torch.uint8).flatten().tolist())
    assert hash_of(values) == xxhash.xxh3_64_intdigest(content)
    transposed = values.t().contiguous().t()
    assert not transposed.is_contiguous() and hash_of(transposed) == hash_of(values)
    assert hash_of(values.reshape(12, 5)) != hash_of(values)
    assert hash_of(nn.Parameter(values) if dtype.is_floating_point else values) == hash_of(values)


def test_hash_depends_on_each_bit() -> None:
    values = torch.randn(7, dtype=torch.float64)
    expected = hash_of(values)
    for bit in range(7 * 64):
        flipped = values.clone()
        flipped.view(torch.uint8)[bit // 8] ^= 1 << (bit % 8)
        assert hash_of(flipped) != expected
    assert hash_of(torch.tensor(1.0)) != hash_of(torch.tensor([1.0])) != hash_of(torch.tensor([1]))
    assert hash_of(torch.tensor(0.0)) != hash_of(torch.tensor(-0.0))
    assert hash_of(torch.empty(0, 3)) != hash_of(torch.empty(3, 0))


@on_ranks(4)
def test_comparison_along_each_axis(rank: int) -> None:
    """Ranks 0, 1 / 2, 3 are the groups along "b"; 0, 2 / 1, 3 those along "a"."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))

    def compare(values: dict[str, tuple[float, set[str]]], **options: Any) -> Any:
        tensors = [Replica(name, torch.tensor([value]), frozenset(axes)) for name, (value, axes) in values.items()]
        return compare_replicas(tensors, mesh, CPU, **options)

    equal = {"all": (0.0, {"a", "b"}), "a": (rank % 2, {"a"}), "b": (rank // 2, {"b"}), "own": (rank, set())}
    comparison = compare(equal)
    assert (comparison.num_compared, comparison.differences) == (3, [])
    assert compare({**equal, "a": (rank == 3, {"a"})}).differences == [Difference("a", (1, 3), ())]
    assert compare({**equal, "b": (rank, {"b"})}).differences == [
        Difference("b", (0, 1), ()),
        Difference("b", (2, 3), ()),
    ]
    assert compare({**equal, "all": (rank == 2, {"a", "b"})}).differences == [Difference("all", (0, 1, 2, 3), (2,))]
    assert compare({**equal, "all": (rank % 2, {"a", "b"})}).differences == [Difference("all", (0, 1, 2, 3), ())]
    absent = {**equal, **({"more": (1.0, {"a"})} if rank == 0 else {})}
    assert compare(absent).differences == [Difference("more", (0, 2), ())]
    assert compare(absent, stage_axis="a").differences == []
    with pytest.raises(ValueError, match="got a mesh of 2 ranks, and the default group has 4; pass the mesh of all"):
        compare_replicas([], mesh["a"], CPU)


@on_ranks(4)
def test_axes_of_placements(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data_parallel", "tensor_parallel"))
    every = frozenset(mesh.mesh_dim_names or ())
    local = torch.zeros(2, 2)

    def axes(on: Any, *placements: Any) -> frozenset[str]:
        return training_state.replicated_axes(DTensor.from_local(local, on, placements, run_check=False), every)

    assert training_state.replicated_axes(local, every) == every
    assert axes(mesh, Replicate(), Replicate()) == every
    assert axes(mesh, Shard(0), Replicate()) == {"tensor_parallel"}
    assert axes(mesh["tensor_parallel"], Shard(1)) == {"data_parallel"}
    assert axes(mesh["tensor_parallel"], Replicate()) == every
    assert axes(init_device_mesh("cpu", (4,), mesh_dim_names=("own",)), Replicate()) == frozenset()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite(dtype: torch.dtype, value: float) -> None:
    largest = torch.finfo(dtype).max
    tensors = [torch.full((5, 3), -largest, dtype=dtype), torch.ones(4), torch.empty(0, 2), torch.tensor(-2.0)]
    assert are_finite(tensors)
    assert largest_values(tensors).tolist() == [largest, 1, 0, 2]
    for idx in (0, 1, 3):
        bad = [tensor.clone() for tensor in tensors]
        bad[idx].view(-1)[-1] = value
        assert not are_finite(bad)
        assert largest_values(bad).isfinite().tolist() == [i != idx for i in range(4)]
    imaginary = torch.complex(torch.ones(2), torch.tensor([value, 3.0])).conj()
    assert not are_finite([imaginary]) and largest_values([imaginary[1:]]).tolist() == [3]
    sparse = torch.sparse_coo_tensor([[1]], [value], (3,), check_invariants=True)
    assert not are_finite([sparse]) and are_finite([torch.sparse_coo_tensor([[1]], [2.0], (3,), check_invariants=True)])
    assert are_finite([]) and are_finite([torch.sparse_coo_tensor(size=(3,), check_invariants=True)])


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.mask = nn.Identity()
        self.second = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        all_masked = self.mask(torch.full((3,), float("-inf")))
        weights = torch.softmax(self.mask(torch.cat([torch.zeros(1), all_masked])), 0)
        return self.second(hidden * weights)


def _watched(net: _Net, x: Tensor) -> tuple[ModuleWatch, str | None]:
    watch = ModuleWatch(dict(net.named_modules()), dict(net.named_parameters()))
    watch.is_active = True
    net(x).sum().backward()
    source = watch.first()
    return watch, None if source is None else source.text


def test_first_module() -> None:
    torch.manual_seed(0)
    x, net = torch.randn(2, 4), _Net()
    watch, text = _watched(net, x)
    assert text is None, "a mask's infinite values are no fault"
    watch.remove()
    net.second.weight.data[0, 0] = float("inf")
    watch, text = _watched(net, x)
    assert text == "the output of 'second' (Linear)"
    watch.clear()
    assert watch.first() is None
    watch.remove()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())
    assert _watched(_Net(), x * float("nan"))[1] == "the input of the _Net"


def test_inference_tensors() -> None:
    """They have no version, so that each hook reads them."""
    net = nn.Sequential(nn.Identity(), nn.Linear(4, 4))
    watch = ModuleWatch(dict(net.named_modules()), {})
    watch.is_active = True
    with torch.inference_mode():
        x = torch.ones(2, 4)
        net(x)
        assert watch.first() is None
        x[0, 0] = float("nan")
        net(x)
    source = watch.first()
    assert source is not None and source.text == "the input of the Sequential"


def test_first_gradient() -> None:
    net = _Net()
    net.first.register_forward_hook(lambda module, args, output: torch.sqrt(output * 0))  # the gradient is infinite
    _, text = _watched(net, torch.randn(2, 4))
    assert text in ("the gradient of 'first.weight'", "the gradient of 'first.bias'")


def test_hooks_do_not_change_results() -> None:
    torch.manual_seed(0)
    net, x = _Net(), torch.randn(3, 4)
    net(x).sum().backward()
    expected = [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]
    net.zero_grad()
    watch, _ = _watched(net, x)
    for parameter, gradient in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=0)
    watch.remove()
