"""Experts in plans with sequence_parallel: parity with one device, collectives, and errors."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import weft
from support.expert_lists import MixtralBlock
from support.hugging_face import VOCAB, language_model
from support.parity import assert_same_training, tensor_parallel
from support.ranks import on_ranks
from weft import flight
from weft.strategy import Plan
from weft.strategy.experts import find_experts, has_own_tokens, parallelize_experts
from weft.strategy.sharding.state import state_of

RULES = {
    "model.layers.*.mlp.experts": "experts",
    **{f"model.layers.*.self_attn.{name}_proj": "column" for name in "qkv"},
    "model.layers.*.self_attn.o_proj": "row",
}


def sharded(model: nn.Module, world_size: int, rules: Any = "auto", *, is_on: bool = True) -> nn.Module:
    return weft.parallelize(model, tensor_parallel(world_size), Plan(rules, sequence_parallel=is_on))


def batches(*lengths: int) -> list[Tensor]:
    return [torch.randint(VOCAB, (2, length), generator=torch.Generator().manual_seed(5)) for length in lengths]


def token_loss(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(ids).logits
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


@on_ranks(2, 3)
@pytest.mark.parametrize("rules", ["auto", RULES], ids=["auto", "rules"])
def test_ranks_route_their_own_tokens(world_size: int, rules: Any) -> None:
    """A sequence of one token leaves none for the other ranks."""
    torch.manual_seed(0)
    size = {"num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 8}  # divisible by 2 and 3 ranks
    model = language_model("mixtral", **size)
    model = assert_same_training(lambda m: sharded(m, world_size, rules), model, token_loss, batches(9, 1, 6), "SGD")
    assert all(has_own_tokens(model.get_submodule(name)) for name in find_experts(model))
    weft.strategy.check_replicated_gradients(model)


def _calls(function: Any) -> Counter[str]:
    before = max((each["begin"] for each in flight.calls()), default=0.0)
    function()
    return Counter(each["call"].partition("(")[0] for each in flight.calls() if each["begin"] > before)


# Two layers: two all-gathers of q, k and v's input and one of the last output; an all-to-all of tokens to experts and
# one back, and one of the counts. The router and two norms of each layer sum their gradients.
SHARDED = (
    {"all_gather": 3, "reduce_scatter": 2, "all_to_all": 6},
    {"all_gather": 3, "reduce_scatter": 2, "all_to_all": 4, "all_reduce": 6},
)
# Each layer also gathers the experts' results, and the gradients of their tokens and weights.
UNSHARDED = (
    {"all_gather": 2, "all_reduce": 2, "all_to_all": 6},
    {"all_gather": 4, "all_reduce": 6, "all_to_all": 4},
)


@on_ranks(2)
@pytest.mark.parametrize(("is_on", "expected"), [(True, SHARDED), (False, UNSHARDED)])
def test_number_of_collectives(world_size: int, is_on: bool, expected: tuple[dict[str, int], dict[str, int]]) -> None:
    torch.manual_seed(0)
    model = sharded(language_model("mixtral"), world_size, RULES, is_on=is_on)
    results: list[Tensor] = []
    [ids] = batches(8)
    assert _calls(lambda: results.append(model(ids).logits)) == expected[0]
    assert _calls(lambda: results[0].square().sum().backward()) == expected[1]


@on_ranks(2)
def test_attention_with_replicated_layers_gets_all_tokens(world_size: int) -> None:
    """DeepSeek-V3's attention has layers that stay replicated; its shared experts are MLPs."""
    torch.manual_seed(0)
    model = assert_same_training(
        lambda m: sharded(m, world_size),
        language_model("deepseek_v3"),
        token_loss,
        batches(7, 4),
        "SGD",
        tolerance=1e-6,  # its router computes in float32
    )
    weft.strategy.check_replicated_gradients(model)
    assert has_own_tokens(model.get_submodule("model.layers.1.mlp.experts"))
    kinds = {name: state_of(model.get_submodule(f"model.layers.1.{name}")).sequence_role.kind for name in KINDS}
    assert kinds == KINDS


KINDS = {
    "self_attn": "whole",
    "mlp.gate": "sharded",
    "mlp.experts": "experts",
    "mlp.shared_experts": "fused",
    "input_layernorm": "sharded",
}


@on_ranks(2)
def test_what_needs_all_tokens_raises(world_size: int) -> None:
    model = sharded(language_model("mixtral"), world_size)
    with pytest.raises(ValueError, match="got output_router_logits=True for a model whose routers have a shard of"):
        model(batches(4)[0], output_router_logits=True)
    model(batches(4)[0])
    mesh = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("tensor_parallel", "expert_parallel"))
    model = language_model("mixtral")
    parallelize_experts(model, mesh)
    with pytest.raises(ValueError, match=r"got the experts 'model.layers.0.mlp.experts' on an axis without the tensor"):
        weft.parallelize(model, mesh, Plan(RULES, sequence_parallel=True))
    model = language_model("mixtral")
    for layer in model.model.layers:
        layer.mlp.gate.noise = nn.Parameter(torch.zeros(32))
    with pytest.raises(ValueError, match=r"'model.layers.0.mlp.gate', a MixtralTopKRouter, is left unsharded by the"):
        sharded(model, world_size)
    model = language_model("mixtral")
    for layer in model.model.layers:
        layer.mlp = MixtralBlock()
    with pytest.raises(ValueError, match=r"got the list of experts 'model.layers.0.mlp.experts', whose calls need all"):
        sharded(model, world_size, RULES)
