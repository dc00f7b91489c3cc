"""The layouts and options that a search of a module tries."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from weft.strategy.dry_run.request import CHECKPOINTING
from weft.strategy.tuning.trials import Variant

AXES = ("pipeline_parallel", "data_replicate", "data_parallel", "tensor_parallel")
FORMATS = ("optimizer_state", "master_weights")
_ZERO_STAGES = (3, 2, 1)  # replicas are another axis
_MICRO_BATCHES = (1, 2, 4, 8)  # for each rank of a pipeline


def may_shard_states(options: Mapping[str, Any]) -> bool:
    """Return whether zero_stage=1 goes with the other options."""
    has_formats = any(options.get(name, "float32") != "float32" for name in FORMATS)
    return not options.get("optimizer_in_backward") and not has_formats


@dataclasses.dataclass(frozen=True)
class Choices:
    """The values that a search tries, except for batches whose gradients are accumulated.

    The first ones of checkpointing, steps_in_backward and sequence_parallel are tried first; the others only for
    layouts that do not fit with these.

    Attributes:
        sizes: of axes, and `accumulate_grad_batches`, that are fixed.
        schedule: of pipelines.
        num_micro_batches: None: multiples of the pipeline's ranks.
    """

    sizes: Mapping[str, int]
    zero_stages: tuple[int, ...]
    checkpointing: tuple[str, ...]
    steps_in_backward: tuple[bool, ...]
    sequence_parallel: tuple[bool, ...]
    schedule: str
    num_micro_batches: int | None

    @classmethod
    def beside(cls, options: Mapping[str, Any], sizes: Mapping[str, int]) -> Choices:
        """Return all values of what `options` do not have, without those that exclude each other."""
        in_backward = options.get("optimizer_in_backward")
        stages = _ZERO_STAGES if may_shard_states(options) else _ZERO_STAGES[:-1]
        return cls(
            dict(sizes),
            (options["zero_stage"],) if "zero_stage" in options else stages,
            (options["activation_checkpointing"],) if "activation_checkpointing" in options else CHECKPOINTING,
            (False, True) if in_backward is None else (in_backward,),
            (options["sequence_parallel"],) if "sequence_parallel" in options else (False, True),
            options.get("pipeline_schedule", "1f1b"),
            options.get("num_micro_batches"),
        )

    def layouts(self, num_devices: int) -> Iterator[Variant]:
        """Yield layouts without batches: those without a pipeline first, and of these those with few tensor ranks.

        In a pipeline, stages gather their parameters once in a step with zero_stage 3, too, so that 2 is left out; and
        data-parallel ranks are not combined with replicas, unless the number of replicas is fixed. A pipeline has one
        batch in a step, which it splits.
        """
        num_batches = self.sizes.get("accumulate_grad_batches", 1)
        for pipeline, tensor in _pairs(num_devices):
            if pipeline > 1 and num_batches > 1:
                continue
            num_data = num_devices // pipeline // tensor
            for data in reversed(divisors(num_data)):
                sizes = (pipeline, num_data // data, data, tensor)
                named = zip(AXES, sizes, strict=True)
                if any(self.sizes.get(axis, size) != size for axis, size in named):
                    continue
                if pipeline > 1 and 1 < data < num_data and "data_replicate" not in self.sizes:
                    continue
                for zero_stage in self._zero_stages(pipeline, data):
                    yield Variant(
                        *sizes[1:],
                        zero_stage,
                        num_batches=num_batches,
                        activation_checkpointing=self.checkpointing[0],
                        optimizer_in_backward=self.steps_in_backward[0],
                        sequence_parallel=self.sequence_parallel[0],
                        pipeline_parallel=pipeline,
                        pipeline_schedule=self.schedule if pipeline > 1 else None,
                    )

    def _zero_stages(self, pipeline: int, data: int) -> tuple[int, ...]:
        if data == 1:
            return self.zero_stages[:1]
        if pipeline > 1 and 3 in self.zero_stages:
            return tuple(stage for stage in self.zero_stages if stage != 2)
        return self.zero_stages

    def batch_counts(self, layout: Variant, global_rows: int | None) -> list[int]:
        """Return the numbers for `Variant.with_batches`, ascending: into how many a rank can divide its rows of a step.

        Args:
            global_rows: of a step; None: each data-parallel rank gets the batch as it is.
        """
        if global_rows is not None and (global_rows == 0 or global_rows % layout.num_data):
            return []
        num_rows = None if global_rows is None else global_rows // layout.num_data
        if layout.has_stages:
            return self._micro_batch_counts(layout.pipeline_parallel, num_rows)
        fixed = self.sizes.get("accumulate_grad_batches")
        if num_rows is None:
            return [fixed or 1]
        return [count for count in divisors(num_rows) if fixed in (None, count)]

    def _micro_batch_counts(self, num_ranks: int, num_rows: int | None) -> list[int]:
        if self.num_micro_batches is not None:
            return [self.num_micro_batches]
        counts = [num_ranks * each for each in _MICRO_BATCHES]
        if num_rows is None:
            return counts
        return [count for count in counts if count <= num_rows] or [num_rows]

    def variants_of(self, base: Variant) -> Iterator[Variant]:
        """Yield a layout with each possible value of `steps_in_backward` and `sequence_parallel`."""
        shards_states = base.zero_stage == 1 and base.data_parallel > 1
        steps = self.steps_in_backward[:1] if shards_states else self.steps_in_backward
        tokens = self.sequence_parallel if base.tensor_parallel > 1 else self.sequence_parallel[:1]
        for in_backward, is_sharded in itertools.product(steps, tokens):
            yield dataclasses.replace(base, optimizer_in_backward=in_backward, sequence_parallel=is_sharded)


def _pairs(num_devices: int) -> Iterator[tuple[int, int]]:
    for pipeline in divisors(num_devices):
        for tensor in divisors(num_devices // pipeline):
            yield pipeline, tensor


def divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
