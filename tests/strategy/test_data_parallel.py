"""Averaged gradients, sharded optimizer states, FSDP2 units and norms over data-parallel ranks, against one device."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import weft
from support.models import FeedForward, Llama, LlamaArgs, token_batches
from support.parity import full
from support.ranks import on_ranks
from weft.strategy.data_parallel import (
    GradientReducer,
    ShardedStates,
    apply_fsdp,
    clip_gradients_by_norm,
    sharded_states_of,
)
from weft.strategy.data_parallel.fully_sharded import fsdp_roots

TOKENS = token_batches(8, 37)


def token_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def record_all_reduces(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which the bytes of each later all-reduce are appended."""
    reduced_bytes: list[int] = []
    real = dist.all_reduce

    def all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        reduced_bytes.append(tensor.nbytes)
        return real(tensor, *args, **kwargs)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    return reduced_bytes


class Branches(nn.Module):
    """Uses its first branch on even ranks and its second on odd ones; no rank uses the third."""

    def __init__(self) -> None:
        super().__init__()
        self.common = nn.Linear(3, 3, dtype=torch.float64)
        self.branches = nn.ModuleList(nn.Linear(3, 5, dtype=torch.float64) for _ in range(3))

    def forward(self, x: Tensor, branch: int) -> Tensor:
        return self.branches[branch](self.common(x)).square().mean()


@on_ranks(2, 3)
@pytest.mark.parametrize("bucket_bytes", [1, 200, 25 << 20])
def test_parameters_without_gradients_on_some_ranks_are_averaged(rank: int, world_size: int, bucket_bytes: int) -> None:
    torch.manual_seed(0)
    reference = Branches()
    model = copy.deepcopy(reference)
    reducer = GradientReducer(model, dist.group.WORLD, bucket_bytes)
    inputs = torch.randn(2, world_size, 4, 3, dtype=torch.float64)
    for step in range(2):
        model(inputs[step, rank], rank % 2).backward()
        reducer.finish()
        (sum(reference(inputs[step, r], r % 2) for r in range(world_size)) / world_size).backward()
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        if name.startswith("branches.2"):
            assert ours.grad is None
        else:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-14)


@on_ranks(2)
def test_accumulation_reduces_once(rank: int, world_size: int) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        reduced_bytes = record_all_reduces(monkeypatch)
        model = nn.Linear(4, 6, dtype=torch.float64)
        reference = copy.deepcopy(model)
        dist.broadcast(reference.weight.data, 0)
        model.load_state_dict(reference.state_dict())
        reducer = GradientReducer(model, dist.group.WORLD)
        inputs = torch.randn(3, world_size, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        for step in range(3):
            with reducer.paused() if step < 2 else contextlib.nullcontext():
                model(inputs[step, rank]).square().sum().backward()
                reducer.finish()
            assert reduced_bytes == (
                [] if step < 2 else [(4 * 6 + 6) * 8, 2]
            )  # the gradients, and a flag per parameter
        reference(inputs.flatten(0, 2)).square().sum().div(world_size).backward()
        torch.testing.assert_close(model.weight.grad, reference.weight.grad, rtol=1e-12, atol=0)


@on_ranks(2)
def test_complete_gradients_are_averaged_without_reading_a_tensor(rank: int, world_size: int) -> None:
    """On a GPU, a read waits for all work in flight."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    reducer = GradientReducer(model, dist.group.WORLD)
    model(torch.ones(3, 4)).sum().backward()
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name in ("tolist", "item", "__bool__", "cpu"):
            monkeypatch.setattr(Tensor, name, lambda self, name=name: pytest.fail(f"{name} reads a tensor"))
        reducer.finish()
    assert all(parameter.grad is not None for parameter in model.parameters())


@on_ranks(2)
def test_two_buckets_are_in_flight(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    reducer = GradientReducer(model, dist.group.WORLD, bucket_bytes=8 * 8 * 4 + 8 * 4)
    assert len(reducer._buckets) == 6
    num_in_flight = []
    finish_reduction = reducer._finish_reduction
    reducer._finish_reduction = lambda *args: (num_in_flight.append(len(reducer._in_flight)), finish_reduction(*args))
    model(torch.randn(2, 8) + rank).sum().backward()
    assert len(num_in_flight) == 4  # `finish` waits for the others
    assert max(num_in_flight) <= 2
    reducer.finish()
    assert len(num_in_flight) == 6


@on_ranks(2)
def test_unfinished_gradients_are_averaged_before_step(rank: int, world_size: int) -> None:
    model = nn.Linear(2, 2)
    reducer = GradientReducer(model, dist.group.WORLD)
    model(torch.full((1, 2), rank + 1.0)).sum().backward()
    with pytest.MonkeyPatch.context() as monkeypatch:
        reduced_bytes = record_all_reduces(monkeypatch)
        reducer.finish_if_needed()
        assert torch.equal(model.weight.grad, torch.full((2, 2), 1.5))
        num_reductions = len(reduced_bytes)
        reducer.finish_if_needed()
        assert len(reduced_bytes) == num_reductions


@on_ranks(2)
def test_layer_unfrozen_later_is_averaged(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].requires_grad_(False)
    reducer = GradientReducer(model, dist.group.WORLD)
    x = torch.randn(2, 3) * (rank + 1)
    model(x).sum().backward()
    reducer.finish()
    model[0].requires_grad_(True)
    for _ in range(2):  # first found by its gradient, then by its hook
        model.zero_grad()
        model(x).sum().backward()
        reducer.finish()
        gradients = [torch.empty_like(model[0].weight.grad) for _ in range(world_size)]
        dist.all_gather(gradients, model[0].weight.grad)
        assert torch.equal(*gradients)
        assert gradients[0].abs().sum() > 0


@on_ranks(2)
def test_second_backward_before_finish_raises(rank: int, world_size: int) -> None:
    model = nn.Linear(2, 2)
    reducer = GradientReducer(model, dist.group.WORLD)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match=r"'(weight|bias)' got a gradient from a second backward"):
        model(torch.ones(1, 2)).sum().backward()
    reducer.finish()


@on_ranks(1, 3)
def test_sparse_gradients_are_averaged(rank: int, world_size: int) -> None:
    """Ranks read other rows, equal rows twice, or none; a weight that a dense layer uses, too, is averaged dense."""
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {name: nn.Embedding(5, 2, sparse=True, dtype=torch.float64) for name in ("some", "tied", "no")}
    )
    model["head"] = nn.Linear(2, 5, bias=False, dtype=torch.float64)
    model["head"].weight = model["tied"].weight
    reducer = GradientReducer(model, dist.group.WORLD)
    reference = copy.deepcopy(model)

    def loss(each: nn.ModuleDict, of_rank: int) -> Tensor:
        rows = torch.tensor([0, 0, of_rank])
        result = each["head"](each["tied"](rows)).pow(2).sum()
        return result if of_rank == 1 else result + each["some"](rows).pow(2).sum()

    for _ in range(2):  # the second backward accumulates
        with reducer.paused():
            loss(model, rank).backward()
        for each in range(world_size):
            (loss(reference, each) / world_size).backward()
    reducer.finish()
    some, tied = model["some"].weight.grad, model["tied"].weight.grad
    assert some is not None and some.is_sparse and (world_size == 1 or some.is_coalesced())
    assert tied is not None and not tied.is_sparse and model["no"].weight.grad is None
    torch.testing.assert_close(some.to_dense(), reference["some"].weight.grad.to_dense(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(tied, reference["tied"].weight.grad, rtol=1e-12, atol=1e-12)
    # The oldest supported torch does not clip sparse gradients, so the norm is that of dense copies.
    gradients = [each.grad.to_dense() for each in reference.parameters() if each.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    torch.testing.assert_close(clip_gradients_by_norm(model.parameters(), 0.5), norm)
    expected = reference["some"].weight.grad.to_dense() * (0.5 / (norm + 1e-6)).clamp(max=1.0)
    torch.testing.assert_close(some.to_dense(), expected, rtol=1e-10, atol=1e-12)


OPTIMIZERS = {
    "SGD": {"lr": 0.05, "momentum": 0.9, "nesterov": True},
    "AdamW": {"lr": 1e-2, "amsgrad": True},
    "Adam": {"lr": 1e-2, "weight_decay": 0.1},
    "Adagrad": {"lr": 1e-2},
    "RMSprop": {"lr": 1e-3, "centered": True, "momentum": 0.5},
    "Adamax": {"lr": 1e-3},
    "NAdam": {"lr": 1e-3},
    "RAdam": {"lr": 1e-2},
    "Adadelta": {},
    "ASGD": {"lr": 1e-2},
    "Rprop": {"lr": 1e-3},
}


@on_ranks(3)
@pytest.mark.parametrize(
    ("name", "gather_bytes"), [*((name, 25 << 20) for name in OPTIMIZERS), ("Adam", 1), ("Adam", 99)]
)
def test_sharded_states_match_unsharded_steps(rank: int, world_size: int, name: str, gather_bytes: int) -> None:
    """Parameters: sizes that 3 does not divide, a scalar, an empty shard on the last rank, a transposed tensor."""
    torch.manual_seed(0)
    values = {
        "matrix": torch.randn(5, 7, dtype=torch.float64),
        "scalar": torch.randn((), dtype=torch.float64),
        "four": torch.randn(4, dtype=torch.float64),
        "columns": torch.randn(6, 4, dtype=torch.float64).t(),
        "without": torch.randn(3, dtype=torch.float64),
    }
    parameters = [
        {k: nn.Parameter(v.clone(memory_format=torch.preserve_format)) for k, v in values.items()} for _ in "ab"
    ]
    optimizers = [
        getattr(torch.optim, name)(
            [{"params": [p["matrix"], p["scalar"]]}, {"params": [p["four"], p["columns"], p["without"]], "lr": 1e-3}],
            **OPTIMIZERS[name],
        )
        for p in parameters
    ]
    weft.strategy.fuse(optimizers[0])
    groups = [list(group["params"]) for group in optimizers[0].param_groups]
    sharded = ShardedStates(optimizers[0], dist.group.WORLD, gather_bytes)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in optimizers]
    for step in range(4):
        for key in ("matrix", "scalar", "four", "columns"):
            grad = torch.randn(values[key].shape, dtype=torch.float64)
            for p in parameters:
                p[key].grad = grad.clone()
        for each, scheduler in zip(optimizers, schedulers, strict=True):
            each.step((lambda: torch.zeros(())) if step % 2 else None)
            scheduler.step()
            each.zero_grad()
        assert all(p.grad is None for p in parameters[0].values())
        for ours, theirs in zip(parameters[0].values(), parameters[1].values(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    assert [list(map(id, g["params"])) for g in optimizers[0].param_groups] == [list(map(id, g)) for g in groups]
    assert sharded_states_of(optimizers[0]) is sharded
    local_numel = sum(
        v.numel() for s in optimizers[0].state.values() for v in s.values() if isinstance(v, Tensor) and v.dim() == 1
    )
    full_numel = sum(
        v.numel() for p, s in optimizers[1].state.items() for k, v in s.items() if torch.is_tensor(v) and k != "step"
    )
    assert local_numel <= -(-full_numel // world_size) + 8, "states are not sharded"
    packed, expected = optimizers[0].state_dict(), optimizers[1].state_dict()
    for idx, state in expected["state"].items():
        parameter = [p for group in groups for p in group][idx]
        for key, value in state.items():
            if key != "step" and torch.is_tensor(value):
                ours = packed["state"][idx][key]
                ours = sharded.gather_full(parameter, ours) if ours.dim() == 1 else ours
                torch.testing.assert_close(ours, value.view(ours.shape), rtol=1e-12, atol=1e-14)


@on_ranks(2)
def test_sharded_states_with_lbfgs_raise(world_size: int) -> None:
    parameter = nn.Parameter(torch.ones(4))
    with pytest.raises(ValueError, match="LBFGS is not known to step each element"):
        ShardedStates(torch.optim.LBFGS([parameter]), dist.group.WORLD)


@on_ranks(4)
@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, float("inf")])
def test_norm_over_mixed_meshes_matches_unsharded(rank: int, world_size: int, norm_type: float) -> None:
    """torch does not support DTensors of different meshes, nor mixed with plain tensors (pytorch #180346)."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data_parallel", "tensor_parallel"))
    torch.manual_seed(0)
    reference = [nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in ((5, 3), (4,), (3, 5), (7, 2), ())]
    for parameter in reference:
        parameter.grad = torch.randn_like(parameter)
    tensor_mesh, replicate = mesh["tensor_parallel"], Replicate()
    placed = [
        (mesh, [Shard(0), Shard(1)]),
        (None, None),
        (tensor_mesh, [Shard(1)]),
        (mesh, [replicate, Shard(0)]),
        (tensor_mesh, [replicate]),
    ]
    ours = []
    for parameter, (on, placements) in zip(reference, placed, strict=True):
        value = parameter.detach().clone()
        grad = parameter.grad.clone()
        if on is not None:
            value, grad = distribute_tensor(value, on, placements), distribute_tensor(grad, on, placements)
        ours.append(nn.Parameter(value))
        ours[-1].grad = grad
    with pytest.raises(Exception):  # noqa: B017  (the class depends on torch's version)
        nn.utils.clip_grad_norm_(list(copy.copy(ours)), float("inf"), norm_type)
    expected = nn.utils.clip_grad_norm_(reference, 0.5, norm_type)
    norm = clip_gradients_by_norm(ours, 0.5, norm_type)
    torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
    for mine, theirs in zip(ours, reference, strict=True):
        torch.testing.assert_close(full(mine.grad), theirs.grad, rtol=1e-12, atol=0)
    ours[0].grad.to_local().fill_(float("nan"))
    with pytest.raises(RuntimeError, match=r"norm of order .* is nan"):
        clip_gradients_by_norm(ours, 0.5, norm_type, error_if_nonfinite=True)
    assert clip_gradients_by_norm([], 1.0).item() == 0


class TwoModels(nn.Module):
    def __init__(self, tie: bool) -> None:
        super().__init__()
        args = LlamaArgs(dtype=torch.float64)
        self.parts = nn.ModuleDict({"first": Llama(args), "second": FeedForward(16, 8, torch.float64)})
        self.head = nn.Linear(16, 37, bias=False, dtype=torch.float64)
        if tie:
            self.head.weight = self.parts["first"].tok_embeddings.weight

    def step(self, tokens: Tensor) -> Tensor:
        tied = self.head.weight is self.parts["first"].tok_embeddings.weight
        logits = self.head(self.parts["second"](self.head.weight[tokens] if tied else torch.ones(3, 16).double()))
        return logits.square().mean() + self.parts["first"](tokens).mean()


@on_ranks(2)
@pytest.mark.parametrize("tie", [False, True])
def test_fsdp_units_match_unsharded(world_size: int, tie: bool) -> None:
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("data_parallel",))
    reference = TwoModels(tie)
    model = copy.deepcopy(reference)
    names = apply_fsdp(model, mesh, entry_points=["step"])
    layers = ["parts.first.layers.0", "parts.first.layers.1"]
    assert names == (["", *layers] if tie else ["", "parts.first", *layers, "parts.second", "head"])
    assert apply_fsdp(model, mesh, entry_points=["step"]) == names
    assert fsdp_roots(model) == [model]
    with pytest.raises(ValueError, match="fully_shard was applied to the model itself already"):
        apply_fsdp(model, mesh, reshard_after_forward=False)
    torch.testing.assert_close(model.step(TOKENS[0][0]), reference.step(TOKENS[0][0]))
    model.step(TOKENS[0][0]).backward()
    reference.step(TOKENS[0][0]).backward()
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert isinstance(ours, DTensor)
        torch.testing.assert_close(full(ours.grad), theirs.grad, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: n + m)


@on_ranks(2)
def test_manual_optimization_with_shared_parameters_raises(world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("data_parallel",))
    with pytest.raises(ValueError, match=r"TwoModels cannot gather parameters .* such as 'parts.first.tok_embeddings"):
        apply_fsdp(TwoModels(tie=True), mesh, entry_points=["step"], root_is_unit=False)
    names = apply_fsdp(TwoModels(tie=False), mesh, entry_points=[], root_is_unit=False)
    assert "" not in names


@on_ranks(2)
def test_frozen_model_has_nothing_to_average(world_size: int) -> None:
    model = nn.Linear(2, 2).requires_grad_(False)
    reducer = GradientReducer(model, dist.group.WORLD)
    reducer.finish()
    model.requires_grad_(True)
    model(torch.ones(1, 2)).sum().backward()
    reducer.finish()
    assert model.weight.grad is not None
