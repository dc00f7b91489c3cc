"""Experts in an nn.ModuleList: recognition, results of unmodified forwards, state dicts, effects, and errors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import weft
from support.expert_lists import BLOCKS, DEAD, HIDDEN, NUM_EXPERTS, TOP_K, VOCAB, GatedMlp, list_model
from support.ranks import on_ranks
from weft.strategy import deferred_init
from weft.strategy.experts import find_expert_lists, find_experts, is_expert, parallelize_experts
from weft.strategy.experts.entry import check_experts
from weft.strategy.experts.lists import ExpertList
from weft.strategy.reports.summary import expert_lines

NUM_TOKENS = (0, 5, 3)  # of the ranks


def expert_mesh(world_size: int, num_holders: int = 1) -> DeviceMesh:
    names = ("data_parallel", "expert_parallel")
    return init_device_mesh("cpu", (num_holders, world_size // num_holders), mesh_dim_names=names)


def block(kind: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return BLOCKS[kind](**options).to(torch.float64)


def values_of(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in state.items()}


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients by the names of the unsharded model: a copy of the model has them as values."""
    holder = copy.deepcopy(model)
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), holder.parameters(), strict=True):
            theirs.copy_(torch.zeros_like(mine) if mine.grad is None else mine.grad)
    names = dict(holder.named_buffers())
    return {name: value for name, value in values_of(holder.state_dict()).items() if name not in names}


def test_lists_are_found() -> None:
    for kind in BLOCKS:
        model = list_model(kind)
        assert find_expert_lists(model) == [f"layers.{i}.mlp.experts" for i in range(2)], kind
        assert not find_experts(model)
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(2, 2)]), "experts": nn.ModuleList()})
    assert not find_expert_lists(model)


@on_ranks(2, 3)
def test_results_and_gradients_match_one_device(rank: int, world_size: int) -> None:
    """One rank has no tokens, and one expert gets none."""
    num_tokens = list(NUM_TOKENS[:world_size])
    for kind in BLOCKS:
        reference = block(kind)
        model = nn.ModuleDict({"mlp": copy.deepcopy(reference)})
        assert parallelize_experts(model, expert_mesh(world_size)) == ["mlp.experts"]
        assert expert_lines(model) == [f"sharded: 1 {type(reference.experts[0]).__name__} by experts."]
        torch.manual_seed(1)
        tokens = torch.randn(sum(num_tokens), 1, HIDDEN, dtype=torch.float64)
        mine = tokens.split(num_tokens)[rank].clone().requires_grad_()
        full = tokens.clone().requires_grad_()
        results = []
        for each, x in ((model.mlp, mine), (reference, full)):
            result, logits = each(x)
            (result.square().sum() + logits.square().sum()).backward()
            results.append(result)
        torch.testing.assert_close(results[0], results[1].split(num_tokens)[rank], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(mine.grad, full.grad.split(num_tokens)[rank], rtol=1e-10, atol=1e-12)
        expected = gradients_of(reference)
        found = gradients_of(model.mlp)
        assert found.keys() == expected.keys()
        for name, gradient in found.items():
            if name.startswith("experts."):
                torch.testing.assert_close(
                    gradient * world_size, expected[name], rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
                )
        dead = [name for name in expected if name.startswith(f"experts.{DEAD}.")]
        assert dead and (kind == "dense" or not any(expected[name].any() for name in dead))


@on_ranks(2)
def test_state_dicts_are_those_of_the_unsharded_model(rank: int, world_size: int) -> None:
    for kind in ("masked", "list"):
        reference, model = list_model(kind), list_model(kind)
        model.load_state_dict(reference.state_dict())
        reference.double()
        for source, target in zip(reference.parameters(), model.parameters(), strict=True):
            target.data.copy_(source)
        parallelize_experts(model, expert_mesh(world_size))
        first = model.layers[0].mlp.experts
        assert len(first) == NUM_EXPERTS and len(list(first)) == NUM_EXPERTS and len(first[1:3]) == 2
        own = sum(p._local_tensor.numel() for p in first.parameters())
        of_expert = sum(p.numel() for p in reference.layers[0].mlp.experts[0].parameters())
        assert own == of_expert * (4 if rank == 0 else 3)
        assert all(is_expert(p) and p.placements == (Shard(0),) for p in first.parameters())
        state, expected = model.state_dict(), reference.state_dict()
        assert state.keys() == expected.keys()
        for name, value in values_of(state).items():
            assert state[name].shape == expected[name].shape
            torch.testing.assert_close(value, expected[name], rtol=0, atol=0, msg=lambda m, n=name: f"{n}: {m}")
        doubled = {name: value * 2 for name, value in state.items()}
        model.load_state_dict(doubled)  # of DTensors
        torch.testing.assert_close(values_of(model.state_dict()), {n: v * 2 for n, v in expected.items()})
        model.load_state_dict(expected)  # of full tensors
        torch.testing.assert_close(values_of(model.state_dict()), dict(expected))
        del doubled["layers.0.mlp.experts.2." + ("w1.weight" if kind == "list" else "0.bias")]
        with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"layers.0.mlp.experts.stacked"):
            model.load_state_dict(doubled)


@on_ranks(2)
def test_forwards_have_their_effects_once(world_size: int) -> None:
    """Random numbers, changes in place of the argument, buffers and attributes are those of one forward."""
    for kind, options in (("mixtral", {"jitter": 0.3}), ("masked", {})):
        reference = block(kind, **options)
        model = nn.ModuleDict({"mlp": copy.deepcopy(reference)})
        parallelize_experts(model, expert_mesh(world_size))
        for step in range(2):
            tokens = torch.randn(2, 3, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
            outcomes = []
            for each in (model.mlp, reference):
                torch.manual_seed(5)
                x = tokens.clone()
                outcomes.append([each(x)[0], x, torch.rand(3)])
            torch.testing.assert_close(*outcomes, rtol=1e-10, atol=1e-12)
        if kind == "masked":
            assert (model.mlp.seen.sum(), model.mlp.num_calls) == (2 * 6 * TOP_K, 2)


class _WithDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Dropout(0.5)) for _ in range(NUM_EXPERTS)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([expert(x) for expert in self.experts]).sum(0)


@on_ranks(2)
def test_experts_follow_the_mode_and_draw_their_own_numbers(rank: int, world_size: int) -> None:
    model = _WithDropout()
    parallelize_experts(model, expert_mesh(world_size))
    x = torch.ones(4, HIDDEN)
    torch.manual_seed(3)
    after = torch.rand(2)
    torch.manual_seed(3)
    in_training = model(x)
    torch.testing.assert_close(torch.rand(2), after)  # this rank's stream is that of a forward without experts
    assert not torch.equal(in_training, model(x))
    model.eval()
    torch.testing.assert_close(model(x), model(x), rtol=0, atol=0)


@on_ranks(2)
def test_style_shards_lists_over_tensor_parallel_ranks(world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tensor_parallel",))
    for kind in ("mixtral", "list"):
        torch.manual_seed(0)
        reference = list_model(kind)
        model = copy.deepcopy(reference)
        weft.parallelize(model, mesh, {"layers.*.mlp.experts": "experts"})
        parameters = list(model.layers[1].mlp.experts.parameters())
        assert parameters and all(p.placements == (Shard(0),) and not is_expert(p) for p in parameters)
        ids = torch.randint(0, VOCAB, (1, 5))
        for each in (model, reference):
            each(ids).logsumexp(-1).square().sum().backward()
        found, expected = gradients_of(model), gradients_of(reference)
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


@on_ranks(2)
def test_deferred_experts_are_drawn_on_their_ranks(world_size: int) -> None:
    torch.manual_seed(0)
    reference = list_model("mixtral")
    torch.manual_seed(0)
    with deferred_init():
        model = list_model("mixtral")
    parallelize_experts(model, expert_mesh(world_size))
    mesh = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("tensor_parallel", "data_parallel"))
    weft.parallelize(model, mesh, "auto")
    found = values_of(model.state_dict())
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0, msg=lambda m, n=name: f"{n}: {m}")


@on_ranks(2)
def test_experts_with_adapters(rank: int, world_size: int) -> None:
    """LoRA on the layers of experts: weights of experts are frozen, and adapters of experts are sharded like them."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["w1", "w2"], init_lora_weights=False)
    reference = peft.get_peft_model(list_model("mixtral"), config).double()
    model = copy.deepcopy(reference)
    parallelize_experts(model, expert_mesh(world_size))
    assert sum(p.requires_grad for p in model.parameters()) == 2 * 2 * 2  # layers, adapted weights, factors
    ids = torch.randint(0, VOCAB, (2, 5))
    model(ids[rank : rank + 1]).square().mean().backward()
    reference(ids).square().mean().backward()
    found, expected = gradients_of(model), gradients_of(reference)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


# ---- errors ------------------------------------------------------------------------------------------------


class _Chain(nn.Module):
    """Calls each "expert" with the result of the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(GatedMlp() for _ in range(NUM_EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        for expert in self.experts:
            x = expert(x)
        return x


def _weighted(model: Any) -> None:
    def forward(self: Any, x: Tensor, weights: Tensor) -> Tensor:
        return x * weights

    for expert in model.layers[1].mlp.experts:
        expert.__class__ = type("Weighted", (GatedMlp,), {"forward": forward})


def _uneven(model: Any) -> None:
    model.layers[1].mlp.experts[2].w1.bias = nn.Parameter(torch.zeros(24))


def _tied(model: Any) -> None:
    model.layers[1].mlp.experts[2].w1.weight = model.layers[1].mlp.experts[3].w1.weight


def _with_buffer(model: Any) -> None:
    for expert in model.layers[1].mlp.experts:
        expert.register_buffer("scale", torch.ones(1))


def _without_forward(model: Any) -> None:
    model.layers[1].mlp = nn.ModuleDict({"experts": model.layers[1].mlp.experts})


CHANGES = {
    _weighted: "the forward of a Weighted takes 2 arguments",
    _uneven: "expert 2 has parameters of other names, shapes, dtypes",
    _tied: "'layers.1.mlp.experts.2.w1.weight' and 'layers.1.mlp.experts.3.w1.weight' are one tied parameter",
    _with_buffer: "its experts have the buffer 'scale'",
    _without_forward: "a ModuleDict has no forward of its own class",
}


@on_ranks(2)
def test_errors_change_nothing(world_size: int) -> None:
    mesh = expert_mesh(world_size)
    for change, text in CHANGES.items():
        model = list_model("mixtral")
        change(model)
        with pytest.raises(ValueError, match=f"cannot shard 'layers.1.mlp.experts': .*{text}"):
            parallelize_experts(model, mesh)
        assert not any(isinstance(each, ExpertList) for each in model.modules()), change
    model = list_model("mixtral")
    model.layers[1].mlp.experts = model.layers[1].mlp.experts[:1]
    with pytest.raises(ValueError, match="of its 1 experts, the last of 2 ranks would hold none"):
        parallelize_experts(model, mesh)
    tensor_mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tensor_parallel",))
    with pytest.raises(ValueError, match=r"style 'experts' cannot shard 'layers.1.mlp.experts': of its 1 experts"):
        weft.parallelize(model, tensor_mesh, {"layers.*.mlp.experts": "experts"})
    model = list_model("mixtral")
    with pytest.raises(ValueError, match=r"got the list of experts 'layers.0.mlp.experts' in a model that is divided"):
        check_experts(model, mesh)
    parallelize_experts(model, mesh)
    parallelize_experts(model, mesh)  # changes nothing
    with pytest.raises(ValueError, match=r"'layers.0.mlp.experts' are sharded over .* already, not over"):
        parallelize_experts(model, expert_mesh(world_size, num_holders=2))
    with pytest.raises(ValueError, match=r"has the style 'replicate', but its experts are sharded over the axis"):
        weft.parallelize(model, tensor_mesh, {"layers.*.mlp.experts": "replicate"})
    with pytest.raises(RuntimeError, match="expert 3 of a sharded list was called outside of the forward"):
        model.layers[0].mlp.experts[3](torch.ones(1, HIDDEN))
    chain = _Chain()
    parallelize_experts(chain, mesh)
    with pytest.raises(RuntimeError, match=r"call 1 of a sharded list's experts, of expert 1 with \[4, 32\], is not"):
        chain(torch.ones(4, HIDDEN))
