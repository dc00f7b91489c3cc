"""Predicts the saved activations of pipeline stages from the memory model and the schedule, without torch."""

from __future__ import annotations

import re
from collections.abc import Mapping

from weft.strategy import _plan
from weft.strategy.estimate.config import DECODERS, PipelineOptions, Training, axis_size, decoder_of

_BLOCK = re.compile(r"model\.layers\.\d+")
_TOKEN_BYTES = 8  # of an int64 id


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
    """Return what prevents the prediction of activations, as the end of a sentence; "": nothing does."""
    assert training.hugging_face is not None
    if training.model is None:
        model_type = training.hugging_face["model_type"]
        is_known_type = model_type in DECODERS
        return f"model_type {model_type!r}{' with mlp_bias or attention_bias' if is_known_type else ''}"
    if training.pipeline is None:  # without a pipeline, only the plan "huggingface" leads here
        return f"the plan {training.plan!r}"
    if training.plan is not None:
        return "pipelines with a plan other than 'auto'"
    assert training.pipeline.cuts is not None
    not_at_blocks = [cut for cut in training.pipeline.cuts if not _BLOCK.fullmatch(cut)]
    return f"a stage that begins at {not_at_blocks[0]!r}, which is not a block" if not_at_blocks else ""


def activations_of_ranks(training: Training, stage_of: Mapping[str, int]) -> list[int]:
    """Return the peak bytes of saved activations by pipeline rank, for the micro-batches that are in flight.

    From the forward of a micro-batch to its backward, a stage keeps the saved activations of its blocks, including
    their inputs. The last stage also keeps those of the final norm and the loss, and the logits. Each rank also
    holds the token ids of the full batch, which are included.

    Args:
        training: a pipeline for which `why_no_activations` returns ""; its cuts are chosen already (not None).
        stage_of: the stage of each layer, by the layer's name.

    Raises:
        ValueError: the memory model does not support the sizes.
    """
    assert training.pipeline is not None
    num_sequences = training.batch["sequences"]
    num_micro_batches = min(training.pipeline.num_micro_batches, num_sequences)
    micro_batch_sizes = _plan.deal_samples(num_sequences, [1.0] * num_micro_batches)
    schedule = schedule_of(training.pipeline, num_micro_batches)
    saved_bytes = {size: _saved_bytes(training, size) for size in set(micro_batch_sizes)}
    costs = []
    for stage in range(schedule.num_stages):
        num_blocks = sum(layer_stage == stage for name, layer_stage in stage_of.items() if _BLOCK.fullmatch(name))
        for size in micro_batch_sizes:
            block_bytes, head_bytes = saved_bytes[size]
            num_bytes = num_blocks * block_bytes + (head_bytes if stage == schedule.num_stages - 1 else 0)
            costs.append(_plan.StageCost(activation_bytes=num_bytes))
    batch_bytes = _batch_bytes(training, num_sequences)
    return [batch_bytes + num_bytes for num_bytes in schedule.simulate(costs).peak_bytes]


def _batch_bytes(training: Training, num_sequences: int) -> int:
    # A sequence has one id more than there are tokens: inputs omit the last id, targets the first.
    return num_sequences * (training.batch["tokens"] + 1) * _TOKEN_BYTES


def _saved_bytes(training: Training, num_sequences: int) -> tuple[int, int]:
    """Return the bytes that a block saves for one micro-batch, and those that the layers after the last block save.

    The latter are computed for an unsharded model, because logits are full on every rank.
    """
    tp_size = axis_size(training.mesh, "tensor_parallel")
    # The bytes are linear in the number of blocks, so two depths give those of a block and those of the rest.
    two_blocks, three_blocks = (_forward_bytes(training, depth, tp_size, num_sequences) for depth in (2, 3))
    two_unsharded, three_unsharded = (_forward_bytes(training, depth, 1, num_sequences) for depth in (2, 3))
    rest = two_unsharded - 2 * (three_unsharded - two_unsharded) - _batch_bytes(training, num_sequences)
    assert training.hugging_face is not None
    element_bytes = 4 if training.options.get("precision", "32-true") == "32-true" else 2
    logits = num_sequences * training.batch["tokens"] * int(training.hugging_face["vocab_size"]) * element_bytes
    return three_blocks - two_blocks, rest + logits


def _forward_bytes(training: Training, num_layers: int, tp_size: int, num_sequences: int) -> int:
    """Return the bytes of saved activations at the peak of the forward of a model with `num_layers` blocks."""
    assert training.hugging_face is not None
    model = decoder_of({**training.hugging_face, "num_hidden_layers": num_layers})
    assert model is not None
    # Parameters that FSDP2 gathers in half precision are not copied again; the number of ranks does not matter.
    data_size = min(2, axis_size(training.mesh, "data_parallel"))
    mesh = _plan.Mesh([("data_parallel", data_size), ("tensor_parallel", tp_size)])
    saved: int = training.spec(model, mesh, sequences=num_sequences).predict(0)["forward"]["saved_activations"]
    return saved
