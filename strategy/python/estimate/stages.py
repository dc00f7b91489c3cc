"""Predicts the saved activations of pipeline stages from the memory model and the schedule, without torch."""

from __future__ import annotations

import re
from collections.abc import Mapping

from weft.strategy import _plan
from weft.strategy.estimate.config import DECODERS, PipelineOptions, Training, axis_size, decoder_of

_BLOCK = re.compile(r"model\.layers\.\d+")
_TOKEN_BYTES = 8


def schedule_of(pipeline: PipelineOptions, num_micro_batches: int) -> _plan.Schedule:
    """Return the schedule of a pipeline for `num_micro_batches` micro-batches.

    Raises:
        ValueError: the schedule does not support this number of stages per rank.
    """
    assert pipeline.cuts is not None
    stages_per_rank = (len(pipeline.cuts) + 1) // pipeline.num_ranks
    generated = _plan.Schedule.generate(pipeline.schedule, pipeline.num_ranks, num_micro_batches, stages_per_rank)
    return generated.merge_backwards()


def why_no_activations(training: Training) -> str:
    """Return the case for which activations are not predicted, as the end of a sentence; "": they are predicted."""
    assert training.hugging_face is not None
    if training.model is None:
        model_type = training.hugging_face["model_type"]
        is_with_biases = model_type in DECODERS
        return f"model_type {model_type!r}{' with mlp_bias or attention_bias' if is_with_biases else ''}"
    if training.pipeline is None:
        return f"the plan {training.plan!r}"
    if training.plan is not None:
        return "pipelines with another plan than 'auto'"
    assert training.pipeline.cuts is not None
    inside = [cut for cut in training.pipeline.cuts if not _BLOCK.fullmatch(cut)]
    return f"a stage that begins at {inside[0]!r}, which is not a block" if inside else ""


def activations_of_ranks(training: Training, stage_of: Mapping[str, int]) -> list[int]:
    """Return the peak bytes of saved activations by pipeline rank, for the micro-batches that are in flight.

    From the forward of a micro-batch to its backward, a stage keeps the saved activations of its blocks, including
    their inputs. The last stage also keeps those of the final norm and the loss, and the logits. Every rank has the
    full batch.

    Args:
        training: one for which `why_no_activations` returns "", with the names of its cuts.
        stage_of: the stage of each layer, by its name.

    Raises:
        ValueError: the memory model does not support the sizes.
    """
    assert training.pipeline is not None
    sequences = training.batch["sequences"]
    num_micro_batches = min(training.pipeline.num_micro_batches, sequences)
    sizes = _plan.deal_samples(sequences, [1.0] * num_micro_batches)
    schedule = schedule_of(training.pipeline, num_micro_batches)
    saved = {size: _saved(training, size) for size in set(sizes)}
    costs = []
    for stage in range(schedule.num_stages):
        num_blocks = sum(layer_stage == stage for name, layer_stage in stage_of.items() if _BLOCK.fullmatch(name))
        for size in sizes:
            of_block, of_end = saved[size]
            num_bytes = num_blocks * of_block + (of_end if stage == schedule.num_stages - 1 else 0)
            costs.append(_plan.StageCost(activation_bytes=num_bytes))
    batch_bytes = _batch_bytes(training, sequences)
    return [batch_bytes + num_bytes for num_bytes in schedule.simulate(costs).peak_bytes]


def _batch_bytes(training: Training, sequences: int) -> int:
    return sequences * (training.batch["tokens"] + 1) * _TOKEN_BYTES


def _saved(training: Training, sequences: int) -> tuple[int, int]:
    """Return the bytes saved for one micro-batch by a block, and by the layers after the last block.

    The latter are those of an unsharded model, because logits are full on every rank.
    """
    tp_size = axis_size(training.mesh, "tensor_parallel")
    of_block = _forward(training, 3, tp_size, sequences)[0] - _forward(training, 2, tp_size, sequences)[0]
    (two, logits), (three, _) = (_forward(training, num_layers, 1, sequences) for num_layers in (2, 3))
    return of_block, two - 2 * (three - two) - _batch_bytes(training, sequences) + logits


def _forward(training: Training, num_layers: int, tp_size: int, sequences: int) -> tuple[int, int]:
    """Return the bytes of saved activations and of logits at the end of the forward of `num_layers` blocks."""
    assert training.hugging_face is not None
    model = decoder_of({**training.hugging_face, "num_hidden_layers": num_layers})
    assert model is not None
    mesh = _plan.Mesh([("tensor_parallel", tp_size)])
    at_peak = training.spec(model, mesh, sequences=sequences).predict(0)["forward"]
    return at_peak["saved_activations"], at_peak["scratch"]
