"""`weft estimate --config` predicts what dry runs count, for the stages of pipelines and for each ZeRO stage."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.extended import extended_unless, selected
from support.hugging_face import language_model
from weft.strategy import _plan
from weft.strategy.dry_run import Request
from weft.strategy.dry_run.entry import DryRunEstimate, estimate_all
from weft.strategy.estimate import Estimate, estimate_training
from weft.strategy.estimate.config import read_config

PEAK_BOUND = 0.02
SEQUENCES, TOKENS = 4, 128
LLAMA = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": TOKENS,
}
HALVES, QUARTERS = ["model.layers.2"], ["model.layers.1", "model.layers.2", "model.layers.3"]
CASES: list[tuple[str, dict[str, Any]]] = [
    ("rep2", {}),
    ("rep2", {"accumulate_grad_batches": 2}),
    ("dp2", {"zero_stage": 1}),
    ("dp2", {"zero_stage": 1, "precision": "bf16-mixed", "activation_checkpointing": "full"}),
    ("dp2", {"zero_stage": 2}),
    ("rep2,dp2", {"zero_stage": 2, "precision": "bf16-mixed"}),
    ("dp2", {"activation_checkpointing": "full:2"}),
    ("pp2,dp2", {"pipeline_cuts": HALVES, "num_micro_batches": 4, "activation_checkpointing": "full:1"}),
    ("pp2", {"pipeline_cuts": HALVES, "num_micro_batches": 4}),
    ("pp2", {"pipeline_cuts": ["model.layers.1"], "pipeline_schedule": "gpipe", "activation_checkpointing": "full"}),
    ("pp2", {"pipeline_cuts": HALVES, "precision": "bf16-mixed", "num_micro_batches": 2}),
    ("pp2", {"pipeline_cuts": HALVES, "precision": "bf16-true", "optimizer_in_backward": True}),
    ("pp2", {"pipeline_cuts": QUARTERS, "pipeline_schedule": "interleaved", "num_micro_batches": 4}),
    ("pp4", {"pipeline_cuts": QUARTERS, "num_micro_batches": 4}),
    ("pp2,tp2", {"pipeline_cuts": HALVES, "num_micro_batches": 4}),
    ("pp2,dp2", {"pipeline_cuts": HALVES, "num_micro_batches": 4, "zero_stage": 1}),
    ("pp2,dp2", {"pipeline_cuts": HALVES, "num_micro_batches": 4}),
    ("pp2,dp2", {"pipeline_cuts": QUARTERS, "pipeline_schedule": "interleaved", "precision": "bf16-mixed"}),
    ("pp2,rep2", {"pipeline_cuts": HALVES, "num_micro_batches": 2, "precision": "bf16-mixed"}),
]
TIED_CASES: list[tuple[str, dict[str, Any]]] = [
    ("pp2", {"pipeline_cuts": HALVES, "num_micro_batches": 4}),
    ("pp2", {"pipeline_cuts": HALVES, "num_micro_batches": 2, "optimizer_in_backward": True}),
    ("pp2,dp2", {"pipeline_cuts": HALVES, "num_micro_batches": 4}),
]
ALL_CASES = [*((False, *case) for case in CASES), *((True, *case) for case in TIED_CASES)]


def llama() -> nn.Module:
    return language_model("llama", torch.float32, **LLAMA, use_cache=False)


def tied_llama() -> nn.Module:
    return language_model("llama", torch.float32, **LLAMA, use_cache=False, tie_word_embeddings=True)


def tokens() -> dict[str, Tensor]:
    ids = torch.arange(SEQUENCES * TOKENS).remainder(LLAMA["vocab_size"]).view(SEQUENCES, TOKENS)
    return {"input_ids": ids, "labels": ids.clone()}


@pytest.fixture(scope="module")
def dry_runs(request: pytest.FixtureRequest) -> dict[int, DryRunEstimate]:
    """Return the dry run of each selected case, from one process."""
    chosen = selected(request, "idx")
    requests = [
        Request(tied_llama if is_tied else llama, layout, tokens, num_steps=2, **options)
        for is_tied, layout, options in (ALL_CASES[idx] for idx in chosen)
    ]
    return dict(zip(chosen, estimate_all(requests), strict=True))


def _estimate(layout: str, options: dict[str, Any], is_tied: bool = False) -> Estimate:
    batch = {"sequences": SEQUENCES, "tokens": TOKENS}
    model = {"model_type": "llama", **LLAMA, "tie_word_embeddings": is_tied}
    config = {"model": model, "layout": layout, "batch": batch, **options}
    return estimate_training(read_config(config, Path()))


# The others combine options of these.
KEPT = {1, 3, 5, 6, 7, 9, 11, 12, 13, 14, 15, 18, 20, 21}


@pytest.mark.parametrize("idx", extended_unless(KEPT.__contains__, range(len(ALL_CASES))))
def test_configuration_predicts_what_dry_runs_count(dry_runs: dict[int, DryRunEstimate], idx: int) -> None:
    is_tied, layout, options = ALL_CASES[idx]
    found = _estimate(layout, options, is_tied)
    assert not found.note and sum(each.num_ranks for each in found.ranks) == _plan_size(layout)
    for counted in dry_runs[idx].ranks:
        predicted = next(each for each in reversed(found.ranks) if each.rank <= counted.rank).phases
        for category in ("gradients", "optimizer_state"):
            assert predicted["step"][category] == counted.phases["step"][category], (counted.rank, category)
        # The model of transformers keeps the frequencies of its rotary positions, a few hundred bytes.
        assert abs(predicted["step"]["parameters"] - counted.phases["step"]["parameters"]) <= 256
        peak, expected = (_peak(phases) for phases in (predicted, counted.phases))
        assert abs(peak - expected) <= PEAK_BOUND * expected, (counted.rank, predicted, counted.phases)


def _plan_size(layout: str) -> int:
    return math.prod(int(re.sub(r"\D", "", part)) for part in layout.split(","))


def _peak(phases: dict[str, dict[str, int]]) -> int:
    return max(sum(usage.values()) for phase, usage in phases.items() if phase != "init")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activation_checkpointing": "full:5"}, "got checkpoints of the first 5 of 4 blocks"),
        ({"activation_checkpointing": "none:1"}, "got checkpoints of the first 1 of 4 blocks"),
        ({"activation_checkpointing": "full:x"}, "got activation_checkpointing 'full:x'"),
        ({"zero_stage": 4}, "got zero_stage = 4; use 0, 1, 2 or 3"),
        ({"zero_stage": 1, "optimizer_in_backward": True}, "got steps in the backward and zero_stage = 1"),
        ({"zero_stage": 1, "optimizer_state": "int8"}, "got low-precision states or weights and zero_stage = 1"),
        ({"layout": "pp2", "pipeline_cuts": HALVES, "accumulate_grad_batches": 2}, "no prediction for pipelines with"),
        ({"layout": "pp2", "pipeline_cuts": ["model.layers.9"]}, "a stage begins at block 9; give ascending blocks"),
    ],
)
def test_invalid_options_raise_errors(options: dict[str, Any], message: str) -> None:
    layout = options.pop("layout", "dp2")
    with pytest.raises(ValueError, match=message):
        _estimate(layout, options)


def test_stages_need_the_axis() -> None:
    model = _plan.FeedForwardModel(dim=4, hidden_dim=4)
    with pytest.raises(ValueError, match="give both the axis pipeline_parallel and the first blocks of stages"):
        _plan.TrainingSpec(model, _plan.Mesh.parse("pipeline_parallel=2")).predict(0)
