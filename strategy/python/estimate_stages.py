"""Activations that the stages of a pipeline keep, from the memory model's blocks and the schedule; without torch."""

from __future__ import annotations

import re
from collections.abc import Mapping

from weft.strategy import _plan
from weft.strategy.estimate_config import DECODERS, PipelineOptions, Training, axis_size, decoder_of

_BLOCK = re.compile(r"model\.layers\.\d+")
_TOKEN_BYTES = 8


def schedule_of(pipeline: PipelineOptions, num_micro_batches: int) -> _plan.Schedule:
    """Return the schedule of a pipeline for so many micro-batches.

    Raises:
        ValueError: the schedule does not take as many stages a rank.
    """
    stages_per_rank = (len(pipeline.cuts) + 1) // pipeline.num_ranks
    generated = _plan.Schedule.generate(pipeline.schedule, pipeline.num_ranks, num_micro_batches, stages_per_rank)
    return generated.merge_backwards()


def why_no_activations(training: Training) -> str:
    """Return what activations are not predicted for, as the end of a sentence; "" for a pipeline where they are."""
    assert training.hugging_face is not None
    if training.model is None:
        model_type = training.hugging_face["model_type"]
        is_with_biases = model_type in DECODERS
        return f"model_type {model_type!r}{' with mlp_bias or attention_bias' if is_with_biases else ''}"
    if training.pipeline is None:
        return f"the plan {training.plan!r}"
    if training.plan is not None:
        return "pipelines with another plan than 'auto'"
    inside = [cut for cut in training.pipeline.cuts if not _BLOCK.fullmatch(cut)]
    return f"a stage that begins at {inside[0]!r}, which is no block" if inside else ""


def activations_of_ranks(training: Training, stage_of: Mapping[str, int]) -> list[int]:
    """Return the most bytes of saved activations by pipeline rank, as the schedule has micro-batches in flight.

    A stage keeps, from the forward of a micro-batch to its backward, what its blocks save, their inputs included; the
    last one what the final norm and the loss save, and the logits, which are alive as long. Every rank has the whole
    batch.

    Args:
        training: one that `why_no_activations` says nothing against.
        stage_of: the stage of each layer, by its name.

    Raises:
        ValueError: sizes that the memory model refuses.
    """
    assert training.pipeline is not None
    sequences = training.batch["sequences"]
    num_micro_batches = min(training.pipeline.num_micro_batches, sequences)
    sizes = _plan.deal_samples(sequences, [1.0] * num_micro_batches)
    schedule = schedule_of(training.pipeline, num_micro_batches)
    saved = {size: _saved(training, size) for size in set(sizes)}
    costs = []
    for stage in range(schedule.num_stages):
        num_blocks = sum(place == stage for name, place in stage_of.items() if _BLOCK.fullmatch(name))
        for size in sizes:
            of_block, of_end = saved[size]
            num_bytes = num_blocks * of_block + (of_end if stage == schedule.num_stages - 1 else 0)
            costs.append(_plan.StageCost(activation_bytes=num_bytes))
    batch_bytes = _batch_bytes(training, sequences)
    return [batch_bytes + num_bytes for num_bytes in schedule.simulate(costs).peak_bytes]


def _batch_bytes(training: Training, sequences: int) -> int:
    return sequences * (training.batch["tokens"] + 1) * _TOKEN_BYTES


def _saved(training: Training, sequences: int) -> tuple[int, int]:
    """Bytes that a block saves of one micro-batch, and that what follows the last one keeps alive.

    The end is that of one rank, as logits are full on every one.
    """
    tp_size = axis_size(training.mesh, "tensor_parallel")
    of_block = _forward(training, 3, tp_size, sequences)[0] - _forward(training, 2, tp_size, sequences)[0]
    (two, logits), (three, _) = (_forward(training, num_layers, 1, sequences) for num_layers in (2, 3))
    return of_block, two - 2 * (three - two) - _batch_bytes(training, sequences) + logits


def _forward(training: Training, num_layers: int, tp_size: int, sequences: int) -> tuple[int, int]:
    """Saved activations, and the logits, at the end of the forward of a model of so many blocks."""
    assert training.hugging_face is not None
    model = decoder_of({**training.hugging_face, "num_hidden_layers": num_layers})
    assert model is not None
    mesh = _plan.Mesh([("tensor_parallel", tp_size)])
    at_peak = training.spec(model, mesh, sequences=sequences).predict(0)["forward"]
    return at_peak["saved_activations"], at_peak["scratch"]
