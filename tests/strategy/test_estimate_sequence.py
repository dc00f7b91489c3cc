"""`weft estimate --config` predicts what dry runs count where tensor-parallel ranks shard the tokens between layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.extended import extended_unless, selected
from support.hugging_face import language_model
from weft.strategy.dry_run import Request
from weft.strategy.dry_run.entry import DryRunEstimate, estimate_all
from weft.strategy.estimate import Estimate, estimate_training
from weft.strategy.estimate.config import read_config

PEAK_BOUND = 0.02
SEQUENCES, TOKENS = 2, 256
LLAMA = {
    "vocab_size": 1024,
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": TOKENS,
}
ATTENTION = {f"model.layers.*.self_attn.{name}_proj": "row" if name == "o" else "column" for name in "qkvo"}
LAYERS = {
    **ATTENTION,
    **{f"model.layers.*.mlp.{name}_proj": "row" if name == "down" else "column" for name in ("gate", "up", "down")},
}
RECOMPUTING = {**ATTENTION, "model.layers.*.mlp": {"style": "column_row_mlp", "recompute": True}}
HALVES, QUARTERS = ["model.layers.2"], ["model.layers.1", "model.layers.2", "model.layers.3"]
MIXED, HALF = {"precision": "bf16-mixed"}, {"precision": "bf16-true"}
SELECTIVE, FULL = {"activation_checkpointing": "selective"}, {"activation_checkpointing": "full"}
STAGES = {"pipeline_cuts": HALVES, "num_micro_batches": 2}
# (layout, options, sequences, tokens)
CASES: list[tuple[str, dict[str, Any], int, int]] = [
    *(("tp2", options, SEQUENCES, TOKENS) for options in ({}, FULL, MIXED, {**MIXED, **SELECTIVE}, {**HALF, **FULL})),
    ("tp4", MIXED, SEQUENCES, TOKENS),
    ("tp4", {**HALF, **SELECTIVE}, SEQUENCES, TOKENS),
    ("tp4", FULL, SEQUENCES, TOKENS),
    ("tp2", {}, 1, TOKENS),  # the tokens of a rank are adjacent
    ("tp4", MIXED, SEQUENCES, 250),  # uneven shards
    ("tp4", {"rank": 3}, SEQUENCES, 250),
    ("tp4", {"rank": 3}, 1, 250),
    ("tp2", {"activation_checkpointing": "full:1"}, SEQUENCES, TOKENS),
    ("tp2", {"plan": LAYERS}, SEQUENCES, TOKENS),
    ("tp2", {"plan": LAYERS, **MIXED}, SEQUENCES, TOKENS),
    ("tp2", {"plan": LAYERS, **HALF, **SELECTIVE}, SEQUENCES, TOKENS),
    ("tp2", {"plan": RECOMPUTING}, SEQUENCES, TOKENS),
    ("tp2", {"plan": RECOMPUTING, **MIXED}, SEQUENCES, TOKENS),
    ("tp2", {"optimizer_in_backward": "rows"}, SEQUENCES, TOKENS),
    ("dp2,tp2", {"zero_stage": 2, **MIXED}, SEQUENCES, TOKENS),
    ("tp2", {"optimizer_state": "int8", "master_weights": "split8", **MIXED}, SEQUENCES, TOKENS),
    ("tp2", {"optimizer_in_backward": True}, SEQUENCES, TOKENS),
    ("tp2", {"accumulate_grad_batches": 2}, SEQUENCES, TOKENS),
    ("dp2,tp2", MIXED, SEQUENCES, TOKENS),
    ("dp2,tp2", {**HALF, **FULL}, SEQUENCES, TOKENS),
    ("rep2,tp2", {**MIXED, **FULL}, SEQUENCES, TOKENS),
    ("pp2,tp2", STAGES, 4, TOKENS),
    ("pp2,tp2", {**STAGES, **MIXED, **FULL}, 4, TOKENS),
    ("pp2,tp4", {**STAGES, **HALF, **SELECTIVE}, 4, TOKENS),
    ("pp2,tp2", {"pipeline_cuts": QUARTERS, "pipeline_schedule": "interleaved", "num_micro_batches": 4}, 4, TOKENS),
    ("pp2,dp2,tp2", {**STAGES, **MIXED}, 4, TOKENS),
]


def llama() -> nn.Module:
    return language_model("llama", torch.float32, **LLAMA, use_cache=False)


def tokens(num_sequences: int, num_tokens: int) -> dict[str, Tensor]:
    ids = torch.arange(num_sequences * num_tokens).remainder(LLAMA["vocab_size"]).view(num_sequences, num_tokens)
    return {"input_ids": ids, "labels": ids.clone()}


@pytest.fixture(scope="module")
def dry_runs(request: pytest.FixtureRequest) -> dict[int, DryRunEstimate]:
    """Return the dry run of each selected case, from one process."""
    chosen = selected(request, "idx")
    requests = [
        Request(llama, layout, tokens(*sizes), num_steps=2, sequence_parallel=True, **options)
        for layout, options, *sizes in (CASES[idx] for idx in chosen)
    ]
    return dict(zip(chosen, estimate_all(requests), strict=True))


def _estimate(layout: str, sequences: int, tokens: int, **options: Any) -> Estimate:
    config = {
        "model": {"model_type": "llama", **LLAMA},
        "layout": layout,
        "batch": {"sequences": sequences, "tokens": tokens},
        **options,
    }
    return estimate_training(read_config(config, Path()))


# The others combine options of these.
KEPT = {0, 3, 4, 9, 11, 12, 15, 17, 18, 19, 20, 21, 22, 25, 27, 29, 30}


@pytest.mark.parametrize("idx", extended_unless(KEPT.__contains__, range(len(CASES))))
def test_configuration_predicts_what_dry_runs_count(dry_runs: dict[int, DryRunEstimate], idx: int) -> None:
    layout, options, *sizes = CASES[idx]
    options = {name: value for name, value in options.items() if name != "rank"}
    found = _estimate(layout, *sizes, sequence_parallel=True, **options)
    for counted in dry_runs[idx].ranks:
        predicted = next(each for each in reversed(found.ranks) if each.rank <= counted.rank).phases
        for category in ("gradients", "optimizer_state"):
            assert predicted["step"][category] == counted.phases["step"][category], (counted.rank, category)
        # The model of transformers keeps the frequencies of its rotary positions, a few hundred bytes.
        assert abs(predicted["step"]["parameters"] - counted.phases["step"]["parameters"]) <= 256
        for phase in ("forward", "backward", "step"):
            peak, expected = (sum(phases[phase].values()) for phases in (predicted, counted.phases))
            assert abs(peak - expected) <= PEAK_BOUND * expected, (counted.rank, phase, predicted, counted.phases)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sequence_parallel": "yes"}, "'sequence_parallel' is 'yes'; give true or false"),
        ({"model": {"feed_forward": {"dim": 64, "hidden_dim": 64}}}, "got sequence parallelism for one MLP"),
        ({"plan": {"model.layers.*.mlp": "column_row_mlp"}}, "the plan gives 'model.layers.0.self_attn.q_proj' the"),
        ({"plan": ATTENTION}, "'model.layers.0.mlp.gate_proj' the style 'replicate'; give it the style 'column', or"),
    ],
)
def test_trainings_without_a_prediction_raise_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _estimate("tp2", SEQUENCES, TOKENS, **{"sequence_parallel": True, **options})


def test_persistent_bytes_of_other_models_do_not_depend_on_it() -> None:
    model = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 64}
    sharded, full = (_estimate("tp2", 1, 8, model=model, sequence_parallel=wanted) for wanted in (True, False))
    assert sharded.note and sharded == full
