"""Stages whose blocks compute on shards of the sequence: lengths of micro-batches in flight, and values that cross."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from torch import nn

from weft.strategy.pipeline.fake_mode import is_recorded
from weft.strategy.pipeline.recording import Recording
from weft.strategy.pipeline.staged_model import StagedModel
from weft.strategy.sharding.sequence_region import SequenceRole
from weft.strategy.sharding.state import state_of

Lengths = Sequence[tuple[int, int] | None]  # `Region.lengths` of each region


class SequenceLengths:
    """The sequence lengths in the regions (see `sharding.sequence_region`) of a rank's stages.

    A forward sets them. A backward that runs code of its forward again needs those of that forward, and forwards of
    other micro-batches, with other lengths, may have run in between.
    """

    def __init__(self, model: nn.Module) -> None:
        roles = [role for module in model.modules() if (role := _role_of(module)) is not None]
        self._regions = list({id(role.region): role.region for role in roles}.values())

    def current(self) -> Lengths:
        """Return the lengths of the last forward."""
        return [region.lengths for region in self._regions]

    @contextlib.contextmanager
    def restored(self, lengths: Lengths) -> Iterator[None]:
        """Inside, the lengths are those of an earlier forward."""
        with contextlib.ExitStack() as stack:
            for region, each in zip(self._regions, lengths, strict=True):
                stack.enter_context(region.with_lengths(each))
            yield


def check_tokens_stay(staged: StagedModel, recording: Recording) -> None:
    """Raise ValueError if tokens cross to another stage of which this rank has only a shard.

    The last block of a stage gathers its tokens; those of the blocks before it stay sharded.
    """
    for stage in staged.stages:
        crossing = set(recording.crossings[stage]) if stage + 1 < recording.num_stages else set()
        for event in recording.events if crossing else ():
            if not isinstance(event.callee, str) or staged.layers.stage_of.get(event.callee) != stage:
                continue
            role = _role_of(staged.model.get_submodule(event.callee))
            tokens = event.output[0] if isinstance(event.output, tuple) else event.output
            if role is None or role.kind != "block" or role.is_last_block or not is_recorded(tokens):
                continue
            if recording.idx_of(tokens) in crossing:
                raise ValueError(
                    f"pipeline: the output of {event.callee!r} is used on a later stage, but the plan shards the "
                    f"sequence between the blocks of stage {stage}, of which only the last one gathers its output; "
                    "move the cuts, or use a plan without sequence_parallel."
                )


def _role_of(module: nn.Module) -> SequenceRole | None:
    state = state_of(module)
    return None if state is None else state.sequence_role
