"""`weft estimate --config` predicts what dry runs of the same models count, which tests compare with ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.extended import extended_unless, selected
from support.hugging_face import language_model
from weft.strategy.dry_run import Request
from weft.strategy.dry_run.entry import estimate_all
from weft.strategy.estimate import estimate_training
from weft.strategy.estimate.config import read_config

PEAK_BOUND = 0.02
SEQUENCES, TOKENS, DIM = 2, 256, 512
LLAMA = {
    "vocab_size": 1024,
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": TOKENS,
}
LLAMA_CASES: list[tuple[str, str, str, dict[str, Any]]] = [
    ("tp2", "bf16-mixed", "none", {}),
    ("tp2", "bf16-true", "selective", {}),
    ("tp2", "bf16-mixed", "full", {}),
    ("rep2,dp2", "bf16-true", "none", {}),
    ("rep2,dp2", "bf16-mixed", "full", {"optimizer_in_backward": True}),
    ("tp2", "bf16-mixed", "none", {"optimizer_state": "int8", "master_weights": "split8"}),
    ("dp2", "32-true", "none", {}),
    ("dp4", "bf16-true", "full", {}),
    ("rep2,dp2", "bf16-mixed", "full", {}),
    ("dp2,tp2", "bf16-mixed", "none", {"optimizer_in_backward": True}),
    ("dp4,tp2", "bf16-mixed", "full", {"optimizer_state": "int8", "master_weights": "split"}),
]
TIED_CASES: list[tuple[str, str, str, dict[str, Any]]] = [
    ("tp2", "bf16-mixed", "none", {}),
    ("dp2", "32-true", "full", {}),
]
MLP_CASES: list[tuple[str, str, str, dict[str, Any]]] = [
    ("tp2", "bf16-mixed", "none", {}),
    ("dp2", "bf16-mixed", "none", {}),
    ("dp2,tp2", "bf16-true", "none", {}),
]


class Mlp(nn.Module):
    """The gated MLP of the configuration."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.w2 = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))
        return result


class SummedMlp(nn.Module):
    """An MLP with its loss, the sum of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.mlp(batch).sum()
        return loss


def llama() -> nn.Module:
    return language_model("llama", torch.float32, **LLAMA, use_cache=False)


def tied_llama() -> nn.Module:
    return language_model("llama", torch.float32, **LLAMA, use_cache=False, tie_word_embeddings=True)


def tokens() -> dict[str, Tensor]:
    ids = torch.arange(SEQUENCES * TOKENS).remainder(LLAMA["vocab_size"]).view(SEQUENCES, TOKENS)
    return {"input_ids": ids, "labels": ids.clone()}


def rows() -> Tensor:
    return torch.zeros(SEQUENCES * TOKENS, DIM)


# (the module, its batch, its model in a configuration and the batch's sizes there, the cases)
TOKEN_SIZES, ROW_SIZES = ({"sequences": n, "tokens": m} for n, m in ((SEQUENCES, TOKENS), (SEQUENCES * TOKENS, 1)))
MODELS: list[tuple[Any, Any, dict[str, Any], dict[str, int], list[tuple[str, str, str, dict[str, Any]]]]] = [
    (llama, tokens, {"model_type": "llama", **LLAMA}, TOKEN_SIZES, LLAMA_CASES),
    (tied_llama, tokens, {"model_type": "llama", **LLAMA, "tie_word_embeddings": True}, TOKEN_SIZES, TIED_CASES),
    (SummedMlp, rows, {"feed_forward": {"dim": DIM, "hidden_dim": DIM}}, ROW_SIZES, MLP_CASES),
]
ALL_CASES = [(*model, case) for *model, cases in MODELS for case in cases]


def _request(idx: int) -> Request:
    module, batch, _, _, (layout, precision, kind, options) = ALL_CASES[idx]
    return Request(module, layout, batch, precision=precision, activation_checkpointing=kind, num_steps=2, **options)


@pytest.fixture(scope="module")
def dry_runs(request: pytest.FixtureRequest) -> dict[int, dict[str, dict[str, int]]]:
    """Return the phases of each selected case, from dry runs in one process."""
    chosen = selected(request, "idx")
    found = estimate_all([_request(idx) for idx in chosen])
    return {idx: each.phases for idx, each in zip(chosen, found, strict=True)}


# The others combine options of these.
KEPT = {0, 1, 3, 4, 5, 7, 10, 12, 13, 15}


@pytest.mark.parametrize("idx", extended_unless(KEPT.__contains__, range(len(ALL_CASES))))
def test_configuration_predicts_what_dry_runs_count(
    tmp_path: Path, dry_runs: dict[int, dict[str, dict[str, int]]], idx: int
) -> None:
    _, _, model, batch, (layout, precision, kind, options) = ALL_CASES[idx]
    config = {
        "model": model,
        "layout": layout,
        "batch": batch,
        "precision": precision,
        "activation_checkpointing": kind,
        **options,
    }
    predicted, counted = estimate_training(read_config(config, tmp_path)).ranks[0].phases, dry_runs[idx]
    for category in ("gradients", "optimizer_state"):
        assert predicted["step"][category] == counted["step"][category], category
    # The model of transformers keeps the frequencies of its rotary positions, a few hundred bytes.
    assert abs(predicted["step"]["parameters"] - counted["step"]["parameters"]) <= 256
    peak, expected = (_peak(phases) for phases in (predicted, counted))
    assert abs(peak - expected) <= PEAK_BOUND * expected, (predicted, counted)


def _peak(phases: dict[str, dict[str, int]]) -> int:
    return max(sum(usage.values()) for phase, usage in phases.items() if phase != "init")
