"""Modules with experts: recognition, the plan style, sharding with all its errors, and communication."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ops.overlapping import overlapping
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

import weft
from support.hugging_face import EXPERT_CONFIGS, VOCAB, language_model
from support.ranks import on_ranks
from weft import flight
from weft.strategy import checkpoint_activations
from weft.strategy.experts import find_experts, halves_choice, is_expert, parallelize_experts
from weft.strategy.reports.summary import expert_lines, summary

DENSE_LAYERS = {"deepseek_v3": 1}
PLANS: dict[str, Any] = {
    "auto": "auto",
    "rule": {"model.layers.*.mlp.experts": "experts"},
    "name of transformers": {"model.layers.*.mlp.experts": "moe_tp_experts"},
    "huggingface": "huggingface",
}


def expert_mesh(world_size: int, num_holders: int = 1) -> DeviceMesh:
    names = ("data_parallel", "expert_parallel")
    return init_device_mesh("cpu", (num_holders, world_size // num_holders), mesh_dim_names=names)


def experts_of(model: nn.Module) -> nn.Module:
    return model.get_submodule("model.layers.1.mlp.experts")


# ---- recognition -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", EXPERT_CONFIGS)
def test_experts_of_transformers_are_found(family: str) -> None:
    model = language_model(family)
    first = DENSE_LAYERS.get(family, 0)
    found = find_experts(model)
    assert list(found) == [f"model.layers.{i}.mlp.experts" for i in range(first, 2)]
    for name, layout in found.items():
        assert set(layout.names) == {each for each, _ in model.get_submodule(name).named_parameters()}
        is_gpt_oss = family == "gpt_oss"
        assert (layout.up_bias is not None, layout.is_transposed, layout.is_concatenated) == (
            *(is_gpt_oss, is_gpt_oss, not is_gpt_oss),
        )


def _with_another_parameter(experts: Any) -> None:
    experts.scale = nn.Parameter(torch.ones(1))


def _with_another_shape(experts: Any) -> None:
    experts.down_proj = nn.Parameter(experts.down_proj[:, :, 1:].detach())


def _with_a_layer(experts: Any) -> None:
    experts.norm = nn.LayerNorm(32)


def _without_a_flag(experts: Any) -> None:
    del experts.has_gate


def _with_another_forward(experts: Any) -> None:
    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        return hidden_states

    experts.__class__ = type("Experts", (type(experts),), {"forward": forward})


@pytest.mark.parametrize(
    "change",
    [_with_another_parameter, _with_another_shape, _with_a_layer, _without_a_flag, _with_another_forward],
)
def test_other_modules_are_no_experts(change: Any) -> None:
    model = language_model("mixtral")
    change(model.get_submodule("model.layers.0.mlp.experts"))
    assert list(find_experts(model)) == ["model.layers.1.mlp.experts"]


# ---- results -----------------------------------------------------------------------------------------------


def _outcome(model: nn.Module, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    logits = model(ids).logits
    logits.logsumexp(-1).square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return logits.detach(), {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in gradients.items()}


@on_ranks(2, 3)
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_ranks_may_have_different_numbers_of_tokens(rank: int, world_size: int, family: str) -> None:
    """One rank has none; gradients of experts are sums over all tokens, divided by the number of ranks."""
    torch.manual_seed(0)
    reference = language_model(family)
    model = copy.deepcopy(reference)
    assert parallelize_experts(model, expert_mesh(world_size)) == list(find_experts(reference))
    assert is_expert(experts_of(model).down_proj) and not is_expert(model.lm_head.weight)
    torch.manual_seed(1)
    num_tokens = [0, 5, 2][:world_size]
    inputs = (torch.randn(sum(num_tokens), 32).double(), torch.rand(sum(num_tokens), 2).double())
    ids = torch.randint(0, 7, (sum(num_tokens), 2))
    tokens, weights = (each.split(num_tokens)[rank].clone().requires_grad_() for each in inputs)
    all_tokens, all_weights = (each.clone().requires_grad_() for each in inputs)
    result = experts_of(model)(tokens, ids.split(num_tokens)[rank], weights)
    expected = experts_of(reference)(all_tokens, ids, all_weights)
    for each in (result, expected):
        each.square().sum().backward()
    torch.testing.assert_close(result, expected.split(num_tokens)[rank], rtol=1e-10, atol=1e-12)
    for mine, full in ((tokens, all_tokens), (weights, all_weights)):
        torch.testing.assert_close(mine.grad, full.grad.split(num_tokens)[rank], rtol=1e-10, atol=1e-12)
    for (name, mine), full in zip(
        experts_of(model).named_parameters(), experts_of(reference).parameters(), strict=True
    ):
        scaled = mine.grad.full_tensor() * world_size
        torch.testing.assert_close(scaled, full.grad, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


@on_ranks(2)
@pytest.mark.parametrize("plan", PLANS)
def test_style_shards_experts_over_tensor_parallel_ranks(world_size: int, plan: str) -> None:
    torch.manual_seed(0)
    reference = language_model("mixtral")
    model = copy.deepcopy(reference)
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tensor_parallel",))
    weft.parallelize(model, mesh, PLANS[plan])
    for parameter in experts_of(model).parameters():
        assert isinstance(parameter, DTensor) and parameter.placements == (Shard(0),) and not is_expert(parameter)
    assert "experts" in str(weft.strategy.report(model))
    assert "2 MixtralExperts by experts" in summary(model)[0]
    ids = torch.randint(0, VOCAB, (1, 5))  # the number of tokens does not divide by that of the ranks
    (logits, gradients), (expected_logits, expected) = _outcome(model, ids), _outcome(reference, ids)
    torch.testing.assert_close(logits, expected_logits, rtol=1e-10, atol=1e-12)
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


@on_ranks(2)
@pytest.mark.parametrize("plan", PLANS)
def test_plans_keep_experts_that_are_sharded_already(world_size: int, plan: str) -> None:
    torch.manual_seed(0)
    reference = language_model("mixtral")
    model = copy.deepcopy(reference)
    parallelize_experts(model, expert_mesh(world_size))
    mesh = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("tensor_parallel", "data_parallel"))
    weft.parallelize(model, mesh, PLANS[plan])
    assert is_expert(experts_of(model).down_proj)
    assert expert_lines(model) == ["sharded: 2 MixtralExperts by experts."]
    assert "2 MixtralExperts by experts" in summary(model)[0]
    ids = torch.randint(0, VOCAB, (1, 5))
    torch.testing.assert_close(model(ids).logits, reference(ids).logits, rtol=1e-10, atol=1e-12)


@on_ranks(2)
@pytest.mark.parametrize("plan", ["auto", "huggingface"])
def test_adapted_experts_stay_unsharded(world_size: int, plan: str) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    model = peft.get_peft_model(language_model("mixtral"), config).double()  # it adapts experts, too
    reference = copy.deepcopy(model)
    with pytest.raises(ValueError, match=r"PEFT adapts parameters of the experts '.*mlp.*'"):
        parallelize_experts(model, expert_mesh(world_size))
    weft.parallelize(model, init_device_mesh("cpu", (world_size,), mesh_dim_names=("tensor_parallel",)), plan)
    assert any(isinstance(parameter, DTensor) for parameter in model.parameters())
    ids = torch.randint(0, VOCAB, (1, 5))
    (logits, gradients), (expected_logits, expected) = _outcome(model, ids), _outcome(reference, ids)
    torch.testing.assert_close(logits, expected_logits, rtol=1e-10, atol=1e-12)
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


# ---- communication -----------------------------------------------------------------------------------------


def _calls(function: Any) -> Counter[str]:
    before = max((each["begin"] for each in flight.calls()), default=0.0)
    function()
    return Counter(each["call"].partition("(")[0] for each in flight.calls() if each["begin"] > before)


@on_ranks(2)
def test_communication_of_a_layer(world_size: int) -> None:
    torch.manual_seed(0)
    models = {"ep": language_model("mixtral"), "tp": language_model("mixtral")}
    parallelize_experts(models["ep"], expert_mesh(world_size))
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tensor_parallel",))
    weft.parallelize(models["tp"], mesh, PLANS["rule"])
    for kind, model in models.items():
        experts = experts_of(model)
        tokens = torch.randn(6, 32, dtype=torch.float64, requires_grad=True)
        weights = torch.rand(6, 2, dtype=torch.float64, requires_grad=True)
        ids = torch.randint(0, 7, (6, 2))
        results = []
        forward = _calls(lambda t=tokens, i=ids, w=weights, e=experts, r=results: r.append(e(t, i, w)))
        backward = _calls(lambda r=results: r[0].sum().backward())
        gathers = kind == "tp"
        assert forward == Counter({"all_to_all": 3, **({"all_gather": 1} if gathers else {})}), (kind, forward)
        assert backward == Counter({"all_to_all": 2, **({"all_gather": 2} if gathers else {})}), (kind, backward)


# ---- halves of the tokens ----------------------------------------------------------------------------------


@on_ranks(2, 3)
@pytest.mark.parametrize(("family", "checkpoint"), [("mixtral", "none"), ("mixtral", "selective"), ("gpt_oss", "full")])
def test_halves_match_the_unsharded_experts(world_size: int, rank: int, family: str, checkpoint: str) -> None:
    torch.manual_seed(0)
    reference = language_model(family)
    model = copy.deepcopy(reference)
    parallelize_experts(model, expert_mesh(world_size))
    checkpoint_activations(model, checkpoint)
    ids = torch.randint(0, VOCAB, (world_size, 5))
    with overlapping("always"):
        logits, gradients = _outcome(model, ids[rank : rank + 1])
    expected_logits, expected = _outcome(reference, ids)
    torch.testing.assert_close(logits, expected_logits[rank : rank + 1], rtol=1e-10, atol=1e-12)
    for name, gradient in expected.items():
        mine = gradients[name.replace("._checkpoint_wrapped_module", "")]
        if not name.startswith("model.layers") or "experts" not in name:
            mine = mine.clone()
            dist.all_reduce(mine)
            mine /= world_size
        torch.testing.assert_close(
            mine * world_size, gradient, rtol=1e-8, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}"
        )


@on_ranks(2)
def test_halves_are_in_flight_while_the_others_compute(world_size: int) -> None:
    torch.manual_seed(0)
    model = language_model("mixtral")
    parallelize_experts(model, expert_mesh(world_size))
    experts: Any = experts_of(model)
    tokens = torch.randn(6, 32, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(6, 2, dtype=torch.float64, requires_grad=True)
    ids = torch.randint(0, 7, (6, 2))
    results: list[Tensor] = []
    with overlapping("always"):
        assert _calls(lambda: results.append(experts(tokens, ids, weights))) == Counter({"all_to_all": 5})
        assert _calls(lambda: results[0].sum().backward()) == Counter({"all_to_all": 4})
        order = _order_of_operators(lambda: experts(tokens, ids, weights).sum().backward())
    products = ["grouped_linear", "_grouped_weight_grad"] * 2
    assert order == [
        *("_moe_start_dispatch", "_moe_start_dispatch"),
        *("grouped_linear", "grouped_linear", "_moe_start_return"),  # the first half
        *("grouped_linear", "grouped_linear", "_moe_start_return"),
        *("_moe_start_dispatch", "_moe_start_dispatch"),
        *(*products, "_moe_start_return"),  # the second half
        *(*products, "_moe_start_return"),
    ], " ".join(order)


@on_ranks(2)
def test_selective_checkpoint_keeps_what_halves_have_exchanged(world_size: int) -> None:
    model = language_model("mixtral")
    parallelize_experts(model, expert_mesh(world_size))
    checkpoint_activations(model, "selective")
    with overlapping("always"):
        logits = model(torch.randint(0, VOCAB, (1, 5))).logits
        assert _calls(lambda: logits.sum().backward()) == Counter({"all_to_all": 2 * 4})  # four for each layer


def _order_of_operators(function: Any) -> list[str]:
    """Return the operators of exchanges and products in the order of their calls."""
    names: list[str] = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func._schema.name.partition("::")[2]
            if name.startswith("_moe_start") or name in ("grouped_linear", "_grouped_weight_grad"):
                names.append(name)
            return func(*args, **(kwargs or {}))

    with Recorder():
        function()
    return names


@on_ranks(2)
def test_measurement_chooses_between_halves_and_all_tokens(
    world_size: int, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One layer measures, for both layers; neither a forward without gradients nor a recomputation does."""
    monkeypatch.setattr(halves_choice, "MEASURED_DEVICES", {"cpu"})
    torch.manual_seed(0)
    model = language_model("mixtral")
    parallelize_experts(model, expert_mesh(world_size))
    checkpoint_activations(model, "full")
    ids = torch.randint(0, VOCAB, (1, 5))

    def forward() -> None:
        with torch.no_grad():
            model(ids)

    def step() -> None:
        model(ids).logits.sum().backward()

    halves_choice.discard_choices()
    with overlapping("auto"):
        assert _calls(forward) == Counter({"all_to_all": 2 * 3})
        calls = _calls(step)
        in_halves = _calls(forward)["all_to_all"] == 2 * 5
        of_step = 2 * (5 + 5 + 4) if in_halves else 2 * (3 + 3 + 2)
        assert calls == Counter({"all_to_all": 8 * (3 + 2 + 5 + 4) + of_step, "all_reduce": 1})
        # The largest ratio of the ranks decides.
        for ratio, num_calls in ((0.95, 10), (0.97, 6)):
            halves_choice.discard_choices()
            monkeypatch.setattr(halves_choice, "_ratio", lambda *_, r=ratio: r if rank == 1 else 0.5)
            step()
            assert _calls(forward) == Counter({"all_to_all": num_calls})
    halves_choice.discard_choices()


# ---- errors ------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_errors_change_nothing(world_size: int) -> None:
    mesh = expert_mesh(world_size)
    with pytest.raises(ValueError, match=r"got a Llama\w+ without a module of experts"):
        parallelize_experts(language_model("llama"), mesh)
    model = language_model("mixtral", num_local_experts=1, num_experts_per_tok=1)
    with pytest.raises(ValueError, match=r"'model.layers.0.mlp.experts': of its 1 experts, the last of 2 ranks would"):
        parallelize_experts(model, mesh)
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    tensor_mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tensor_parallel",))
    with pytest.raises(ValueError, match=r"a mesh with the axes \('tensor_parallel',\); give one"):
        parallelize_experts(model, tensor_mesh)
    with pytest.raises(ValueError, match=r"'experts' cannot shard 'model.layers.0.mlp.experts': of its 1 experts"):
        weft.parallelize(model, tensor_mesh, PLANS["rule"])
    with pytest.raises(ValueError, match=r"'experts' cannot shard 'model.norm': it has no parameters gate_up_proj"):
        weft.parallelize(model, tensor_mesh, {"model.norm": "experts"})
    model = language_model("mixtral")
    weft.parallelize(model, tensor_mesh, PLANS["rule"])
    without_copy = r"export_local: the experts of 'model.layers.0.mlp.experts' are sharded"
    with pytest.raises(ValueError, match=without_copy):
        weft.export_local(model)
    with pytest.raises(ValueError, match=r"'model.layers.0.mlp.experts' are DTensors already; call"):
        parallelize_experts(model, mesh)
    model = language_model("mixtral")
    parallelize_experts(model, mesh)
    parallelize_experts(model, mesh)  # changes nothing
    assert experts_of(model).down_proj.shape == (7, 32, 48)
    with pytest.raises(ValueError, match=without_copy):
        weft.export_local(model)
    with pytest.raises(ValueError, match=r"has the style 'replicate', but its experts are sharded over the axis"):
        weft.parallelize(model, tensor_mesh, {"model.layers.*.mlp.experts": "replicate"})
    with pytest.raises(ValueError, match=r"are sharded over .* already, not over"):
        parallelize_experts(model, expert_mesh(world_size, num_holders=2))
    dist.barrier()
