"""The memory model's peaks of steps that accumulate gradients over batches, against the bytes of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from strategy.dry_run_models import SEQUENCES, TOKENS, measured

from support.ranks import run_on_ranks
from weft.strategy.estimate import estimate_training
from weft.strategy.estimate.config import read_config

PEAK_BOUND = 0.02
DIFFERENCE_BYTES = 64  # what the second batch adds is predicted to the byte, except for alignment
CONFIG = {
    "model": {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "max_position_embeddings": 128,
    },
    "batch": {"sequences": SEQUENCES, "tokens": TOKENS},
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("tp2", {}),
    ("dp2", {}),
    ("dp2", {"precision": "bf16-mixed", "activation_checkpointing": "full"}),
    ("dp2", {"precision": "bf16-true"}),
    ("tp2", {"activation_checkpointing": "full"}),
]


def _peaks(rank: int, world_size: int) -> list[tuple[int, ...]]:
    """Return the peak of each case with one and with two batches in a step."""
    for layout in ("tp2", "dp2"):  # what earlier tests have left on these ranks is freed here, not while bytes count
        measured(rank, world_size, "llama", layout)
    return [
        tuple(
            max(sum(usage.values()) for usage in phases.values())
            for phases in (
                measured(rank, world_size, "llama", layout, accumulate_grad_batches=number, **options)
                for number in (1, 2)
            )
        )
        for layout, options in CASES
    ]


def test_peaks_are_those_of_ranks() -> None:
    found = run_on_ranks(2, _peaks)
    for idx, (layout, options) in enumerate(CASES):
        expected, actual = [], [max(peaks[idx][i] for peaks in found) for i in range(2)]
        for number in (1, 2):
            config = {**CONFIG, **options, "accumulate_grad_batches": number}
            phases = estimate_training(read_config(config, Path(), layout)).ranks[0].phases
            expected.append(max(sum(usage.values()) for phase, usage in phases.items() if phase != "init"))
            assert abs(expected[-1] - actual[number - 1]) <= PEAK_BOUND * actual[number - 1], (layout, options)
        assert abs((expected[1] - expected[0]) - (actual[1] - actual[0])) <= DIFFERENCE_BYTES, (layout, options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accumulate_grad_batches": 0}, "got micro_batches = 0; give a number from 1"),
        ({"accumulate_grad_batches": "2"}, "have a value of the wrong type"),
        (
            {"accumulate_grad_batches": 2, "optimizer_in_backward": "rows"},
            "got steps by rows and 2 micro-batches, whose full gradients are accumulated",
        ),
    ],
)
def test_invalid_options_raise_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        estimate_training(read_config({**CONFIG, **options}, Path(), "tp2"))
