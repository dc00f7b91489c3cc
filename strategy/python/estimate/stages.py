"""The stages of a pipeline: their schedule, and whether the memory model describes them."""

from __future__ import annotations

import re

from weft.strategy import _plan
from weft.strategy.estimate.config import DECODERS, PipelineOptions, Training

_BLOCK = re.compile(r"model\.layers\.\d+")


def schedule_of(pipeline: PipelineOptions, num_micro_batches: int) -> _plan.Schedule:
    """Return the schedule of a pipeline for `num_micro_batches` micro-batches.

    Raises:
        ValueError: the schedule does not support this number of stages per rank.
    """
    assert pipeline.cuts is not None
    stages_per_rank = (len(pipeline.cuts) + 1) // pipeline.num_ranks
    generated = _plan.Schedule.generate(pipeline.schedule, pipeline.num_ranks, num_micro_batches, stages_per_rank)
    return generated.merge_backwards()


def why_not_described(training: Training) -> str:
    """Return why the memory model does not describe a training, as the end of a sentence; "": it does.

    A pipeline has named cuts.
    """
    if training.model is None:
        assert training.hugging_face is not None
        model_type = training.hugging_face["model_type"]
        is_known_type = model_type in DECODERS
        return f"model_type {model_type!r}{' with mlp_bias or attention_bias' if is_known_type else ''}"
    if isinstance(training.plan, str):
        return f"the plan {training.plan!r}"
    if training.pipeline is None:
        return ""
    assert training.pipeline.cuts is not None
    if _plan.splits_backwards(training.pipeline.schedule):
        return f"the schedule {training.pipeline.schedule!r}"
    if "model.layers.0" in training.pipeline.cuts:
        return "a first stage without blocks"
    not_at_blocks = [cut for cut in training.pipeline.cuts if not _BLOCK.fullmatch(cut)]
    return f"a stage that begins at {not_at_blocks[0]!r}, which is not a block" if not_at_blocks else ""
