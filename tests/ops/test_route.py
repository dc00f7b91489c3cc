"""The router and its losses, against Hugging Face's and against loops."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import weft


def _chosen(choice: list[float], top_k: int, num_groups: int, top_groups: int) -> list[int]:
    """Return the experts that are chosen for one token, by a loop."""
    size = len(choice) // num_groups
    groups = [range(start, start + size) for start in range(0, len(choice), size)]
    sums = [sum(sorted((choice[expert] for expert in each), reverse=True)[:2]) for each in groups]
    best = sorted(range(num_groups), key=lambda each: (-sums[each], each))[:top_groups]
    candidates = [expert for each in best for expert in groups[each]]
    return sorted(candidates, key=lambda expert: (-choice[expert], expert))[:top_k]


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("groups", [None, (4, 2), (3, 3), (12, 5)])
def test_matches_a_loop(score: str, normalize: bool, has_bias: bool, groups: tuple[int, int] | None) -> None:
    torch.manual_seed(0)
    logits = torch.randn(9, 12, dtype=torch.float64)
    bias = torch.randn(12, dtype=torch.float64) if has_bias else None
    num_groups, top_groups = groups or (None, None)
    weights, ids = weft.ops.route(
        logits,
        3,
        score=score,
        normalize=normalize,
        bias=bias,
        num_groups=num_groups,
        top_groups=top_groups,
        scale=2.5,
    )
    scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
    for token, row in enumerate(scores):
        chosen = _chosen((row + bias if has_bias else row).tolist(), 3, *(groups or (1, 1)))
        expected = row[chosen] / (row[chosen].sum() if normalize else 1) * 2.5
        assert ids[token].tolist() == chosen
        torch.testing.assert_close(weights[token], expected, rtol=1e-12, atol=0)


def test_matches_deepseek_v3() -> None:
    modeling = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    from transformers import DeepseekV3Config

    config = DeepseekV3Config(
        hidden_size=8, n_routed_experts=16, n_group=4, topk_group=2, num_experts_per_tok=3, moe_intermediate_size=4
    )
    torch.manual_seed(0)
    layer = modeling.DeepseekV3MoE(config)
    torch.nn.init.normal_(layer.gate.weight)
    layer.gate.e_score_correction_bias.normal_()
    logits, weights, ids = layer.gate(torch.randn(1, 20, 8))
    ours, our_ids = weft.ops.route(
        logits,
        3,
        score="sigmoid",
        bias=layer.gate.e_score_correction_bias,
        num_groups=4,
        top_groups=2,
        scale=config.routed_scaling_factor,
        normalize=config.norm_topk_prob,
    )
    order, our_order = ids.argsort(-1), our_ids.argsort(-1)
    assert torch.equal(ids.gather(-1, order), our_ids.gather(-1, our_order))
    torch.testing.assert_close(weights.gather(-1, order), ours.gather(-1, our_order))


def test_equal_scores_are_chosen_in_order_and_half_precision_is_computed_in_float32() -> None:
    weights, ids = weft.ops.route(torch.zeros(3, 8, dtype=torch.bfloat16), 4)
    assert ids.tolist() == [[0, 1, 2, 3]] * 3 and ids.dtype is torch.int64
    assert weights.dtype is torch.float32 and weights.eq(0.25).all()
    weights, _ = weft.ops.route(torch.full((1, 4), -1e4), 2, score="sigmoid")
    assert weights.eq(0).all()  # all scores are 0


def test_gradient_is_that_of_the_weights() -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(6, dtype=torch.float64, requires_grad=True)
    for score in ("softmax", "sigmoid"):
        assert torch.autograd.gradcheck(lambda x, score=score: weft.ops.route(x, 2, score=score)[0], logits)
    weights, _ = weft.ops.route(logits, 2, bias=bias)
    assert torch.autograd.grad(weights.sum(), bias, allow_unused=True) == (None,)


def test_load_balancing_loss() -> None:
    modeling = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    torch.manual_seed(0)
    logits = torch.randn(30, 8, requires_grad=True)
    probabilities = logits.softmax(-1)
    ids = weft.ops.route(logits, 2)[1]
    loss = weft.ops.load_balancing_loss(probabilities, ids, 8)
    torch.testing.assert_close(loss, modeling.load_balancing_loss_func((logits,), 8, 2))
    loss.backward()
    assert logits.grad.abs().sum() > 0
    balanced = torch.arange(16).reshape(8, 2) % 8
    assert weft.ops.load_balancing_loss(torch.full((8, 8), 1 / 8), balanced, 8).item() == pytest.approx(2)
    assert weft.ops.load_balancing_loss(torch.ones(0, 8), torch.ones(0, 2).long(), 8).item() == 0


def test_router_z_loss() -> None:
    logits = torch.tensor([[0.0, math.log(3.0)], [1.0, 1.0]], dtype=torch.float64)
    expected = (math.log(4.0) ** 2 + (1 + math.log(2.0)) ** 2) / 2
    assert weft.ops.router_z_loss(logits).item() == pytest.approx(expected)
    assert weft.ops.router_z_loss(torch.ones(0, 4)).item() == 0
    assert weft.ops.router_z_loss(torch.ones(2, 4).bfloat16()).dtype is torch.float32


X = torch.ones(2, 8)
ERRORS = [
    ((X[0], 1), {}, r"got logits of shape \[8\]; pass those of the router"),
    ((X, 1), {"score": "relu"}, "got score 'relu'; pass 'softmax' or 'sigmoid'"),
    ((X, 0), {}, "got top_k 0 with 8 experts to choose from"),
    ((X, 9), {}, "got top_k 9 with 8 experts to choose from"),
    ((X, 3), {"num_groups": 4, "top_groups": 1}, "got top_k 3 with 2 experts to choose from"),
    ((X, 1), {"num_groups": 3, "top_groups": 1}, "got num_groups 3 and top_groups 1 with 8 experts"),
    ((X, 1), {"num_groups": 4, "top_groups": 5}, "got num_groups 4 and top_groups 5 with 8 experts"),
    ((X, 1), {"num_groups": 4}, "got num_groups 4 with top_groups None; pass both or neither"),
    ((X, 1), {"bias": torch.ones(7)}, r"got bias of shape \[7\] with logits of shape \[2, 8\]"),
]


@pytest.mark.parametrize(("args", "options", "text"), ERRORS)
def test_invalid_arguments_of_the_router_raise(args: tuple[Tensor, int], options: dict, text: str) -> None:
    with pytest.raises(ValueError, match=f"^weft.ops.route: {text}"):
        weft.ops.route(*args, **options)


def test_invalid_arguments_of_losses_raise() -> None:
    with pytest.raises(TypeError, match=r"weft.ops.route: got logits of dtype torch.int64; pass a floating-point"):
        weft.ops.route(X.long(), 1)
    ids = torch.zeros(2, 1).long()
    for probabilities, ids_of, number, text in (
        (X, ids, 7, "with num_experts 7"),
        (X[0], ids, 8, r"got probabilities of shape \[8\]"),
        (X, ids[:, 0], 8, r"expert_ids of shape \[2\]"),
        (X, ids[:1], 8, "got 2 tokens of probabilities and 1 of"),
    ):
        with pytest.raises(ValueError, match=text):
            weft.ops.load_balancing_loss(probabilities, ids_of, number)
    with pytest.raises(ValueError, match=r"weft.ops.router_z_loss: got logits of shape \[8\]"):
        weft.ops.router_z_loss(X[0])
