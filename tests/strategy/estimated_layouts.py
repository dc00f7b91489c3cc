"""The estimate of a layout that a search has found, for the tests of both."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.strategy.estimate import estimate_training
from weft.strategy.estimate.config import read_config
from weft.strategy.tuning.result import FoundLayout


def estimated_peak(found: FoundLayout, config: Mapping[str, Any], tokens: int) -> int:
    """Return the most bytes of a rank by the estimate of `config` with the layout and the options of `found`."""
    config = {
        **config,
        "batch": {"sequences": found.sequences, "tokens": tokens},
        "activation_checkpointing": found.activation_checkpointing,
        "accumulate_grad_batches": found.accumulate_grad_batches,
        "optimizer_in_backward": found.optimizer_in_backward,
        "sequence_parallel": found.sequence_parallel,
        "zero_stage": found.zero_stage,
    }
    if found.pipeline_cuts:
        config["pipeline_cuts"] = list(found.pipeline_cuts)
        config["pipeline_schedule"] = found.pipeline_schedule
        config["num_micro_batches"] = found.num_micro_batches
    estimate = estimate_training(read_config(config, Path(), found.layout))
    return max(rank.peak_bytes for rank in estimate.ranks)
