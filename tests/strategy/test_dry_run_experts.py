"""Dry runs of models with experts predict what the counter measures on ranks that choose all experts equally often."""

from __future__ import annotations

import functools
import json
import sys
from typing import Any

import pytest
import torch
from strategy.dry_run_models import MODELS, experts_of, llama, measured, mixtral, text_batch
from torch import Tensor

import weft_command
from support.ranks import on_ranks
from weft.strategy.dry_run import Request, estimate_module
from weft.strategy.dry_run.balanced_routing import balanced_choices
from weft.strategy.dry_run.entry import estimate_all

# Without a pipeline, predictions equal the counted bytes, but for some step counts and, in half precision, a few bytes.
PEAK_BOUND = {"pp2,dp2,ep2": 0.02}
SMALL_BOUND = 0.001
PLAIN: dict[str, Any] = {"plan": {}}  # Hugging Face's own code computes the experts
Phases = dict[str, dict[str, int]]
CASES: dict[int, list[tuple[str, str, dict[str, Any]]]] = {
    1: [
        ("mixtral", "tp1", PLAIN),
        ("grouped mixtral", "tp1", PLAIN),
        ("gpt_oss", "tp1", {**PLAIN, "activation_checkpointing": "full"}),
    ],
    2: [
        ("uneven mixtral", "dp2,ep2", {"zero_stage": 1}),
        ("deepseek", "dp2,ep2", {"zero_stage": 0, "optimizer_in_backward": True}),
        ("qwen3_moe", "tp2", {"precision": "bf16-mixed", "activation_checkpointing": "selective"}),
        ("olmoe", "dp2", {**PLAIN, "precision": "bf16-mixed"}),
    ],
    4: [
        ("qwen3_moe", "dp4,ep4", {"zero_stage": 0}),
        ("mixtral", "dp4,ep2", {"zero_stage": 1}),
        ("mixtral", "dp4,ep2", {"zero_stage": 3}),
        ("gpt_oss", "dp2,ep2,tp2", {"activation_checkpointing": "full"}),
        ("mixtral", "pp2,dp2,ep2", {"pipeline_cuts": ["model.layers.1"]}),
    ],
}


@pytest.fixture(scope="module")
def predictions() -> dict[int, list[Phases]]:
    """Return the phases of rank 0 in each case, from dry runs in one process."""
    cases = [case for group in CASES.values() for case in group]
    requests = [Request(MODELS[name][0], layout, MODELS[name][1], rank=0, **more) for name, layout, more in cases]
    found = iter(estimate_all(requests))
    return {num_ranks: [next(found).phases for _ in group] for num_ranks, group in CASES.items()}


@on_ranks(1, 2, 4, timeout=400)
def test_peaks_are_those_of_ranks(rank: int, world_size: int, predictions: dict[int, list[Phases]]) -> None:
    for (name, layout, options), predicted in zip(CASES[world_size], predictions[world_size], strict=True):
        actual = measured(rank, world_size, name, layout, **options)
        if rank == 0:
            _check(predicted, actual, f"{name} {layout} {options}", PEAK_BOUND.get(layout, SMALL_BOUND))


def _check(predicted: Phases, actual: Phases, case: str, bound: float) -> None:
    for phase, usage in actual.items():
        for category in ("parameters", "optimizer_state", "gradients"):
            assert predicted[phase][category] == usage[category], (case, phase, category)
    peak, expected = (max(sum(usage.values()) for usage in phases.values()) for phases in (actual, predicted))
    assert abs(expected - peak) <= bound * peak, (case, actual, predicted)


@pytest.mark.parametrize(("num_tokens", "num_choices", "num_experts"), [(64, 2, 8), (9, 2, 7), (5, 4, 4), (3, 2, 1)])
def test_choices_are_balanced(num_tokens: int, num_choices: int, num_experts: int) -> None:
    choices = balanced_choices(torch.Size((num_tokens, num_choices)), num_experts, torch.int64)
    counts = choices.flatten().bincount(minlength=num_experts)
    assert choices.shape == (num_tokens, num_choices) and counts.max() - counts.min() <= 1
    assert counts.tolist() == sorted(counts.tolist(), reverse=True)  # as in weft's operators
    if num_choices <= num_experts:
        assert all(len(set(row)) == num_choices for row in choices.tolist())


def many_tokens() -> dict[str, Tensor]:
    ids = torch.arange(64 * 128).remainder(512).view(64, 128)
    return {"input_ids": ids, "labels": ids.clone()}


def test_choices_of_many_tokens_have_values() -> None:
    """Integers of more than 1 MiB have none elsewhere."""
    module = functools.partial(experts_of, "mixtral", num_local_experts=8, num_hidden_layers=1)
    plain, sharded = (
        estimate_module(module, layout, batch=many_tokens, num_steps=1, **options)
        for layout, options in (("tp1", PLAIN), ("dp2,ep2", {}))
    )
    assert plain.assumes_balanced_routing and sharded.assumes_balanced_routing
    assert plain.phases["forward"]["saved_activations"] > 16 * many_tokens()["input_ids"].nbytes


def test_more_ranks_hold_fewer_experts_of_the_same_rows() -> None:
    """With balanced routing, a rank receives as many rows as it sends, however many ranks there are."""
    options = {"batch": MODELS["mixtral"][1], "zero_stage": 0, "num_steps": 1}
    found = estimate_all([Request(mixtral, layout, **options) for layout in ("dp2,ep2", "dp8,ep8")])
    of_two, of_eight = (each.phases["forward"] for each in found)
    assert of_eight["parameters"] < of_two["parameters"]
    assert abs(of_eight["saved_activations"] - of_two["saved_activations"]) < 0.01 * of_two["saved_activations"]


def test_result_says_that_routing_is_assumed_balanced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    note = "routing is assumed to be balanced: each expert gets equally many tokens"
    arguments = ["--module", "strategy.dry_run_models:mixtral", "--batch", "strategy.dry_run_models:tokens"]
    monkeypatch.setattr(sys, "argv", ["weft", "estimate", *arguments, "--layout", "dp2,ep2", "--json"])
    assert weft_command.main() == 0
    assert json.loads(capsys.readouterr().out)["assumes_balanced_routing"] is True
    with_experts, without = estimate_all(
        [Request(mixtral, "tp2", MODELS["mixtral"][1], num_steps=1), Request(llama, "tp2", MODELS["llama"][1])]
    )
    assert note in str(with_experts).splitlines()
    assert note not in str(without) and without.to_dict()["assumes_balanced_routing"] is False


@pytest.mark.parametrize(
    ("module", "layout", "message"),
    [
        (MODELS["text"][0], "dp3,ep2", "^estimate: got 2 expert-parallel ranks in 3 data-parallel ranks; pass a"),
        (MODELS["text"][0], "dp2,ep2", "^parallelize_experts got a TextModel without a module of experts"),
        (mixtral, "dp16,ep16", "parallelize_experts cannot shard 'model.layers.0.mlp.experts': of its 8 experts"),
    ],
)
def test_layouts_that_do_not_fit_raise_errors(module: Any, layout: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        estimate_module(module, layout, batch=text_batch)


def test_layouts_of_configurations_have_no_experts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    path = tmp_path / "training.yaml"
    path.write_text("model: {feed_forward: {dim: 8, hidden_dim: 16}}\nlayout: tp1\nbatch: {sequences: 1, tokens: 4}\n")
    monkeypatch.setattr(sys, "argv", ["weft", "estimate", "--config", str(path), "--layout", "dp2,ep2"])
    assert weft_command.main() == 2
    assert "layout 'dp2,ep2' has expert-parallel ranks, for which there is no estimate" in capsys.readouterr().err
