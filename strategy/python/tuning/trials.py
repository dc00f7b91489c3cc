"""The variants of a layout for any module, and their dry runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from weft.strategy._plan import Cluster
from weft.strategy.dry_run.process import DryRunProcess, ProcessEndedError
from weft.strategy.dry_run.request import Request
from weft.strategy.dry_run.training import Prediction
from weft.strategy.tuning.result import FoundLayout, layout_text
from weft.strategy.tuning.stages import of_pipeline


@dataclasses.dataclass(frozen=True)
class Variant:
    """A layout with all that a search chooses.

    Attributes:
        num_batches: whose gradients a step accumulates.
        num_micro_batches: of a pipeline; None: the default of its strategy.
    """

    data_replicate: int
    data_parallel: int
    tensor_parallel: int
    zero_stage: int
    num_batches: int = 1
    activation_checkpointing: str = "none"
    optimizer_in_backward: bool = False
    sequence_parallel: bool = False
    pipeline_parallel: int = 1
    pipeline_schedule: str | None = None
    num_micro_batches: int | None = None

    @property
    def layout(self) -> str:
        return layout_text(vars(self))

    @property
    def has_stages(self) -> bool:
        return self.pipeline_parallel > 1

    @property
    def num_ranks(self) -> int:
        return self.pipeline_parallel * self.num_data * self.tensor_parallel

    def with_batches(self, number: int) -> Variant:
        """Return the same with a number of batches or, of a pipeline, of micro-batches."""
        if self.has_stages:
            return dataclasses.replace(self, num_micro_batches=number)
        return dataclasses.replace(self, num_batches=number)

    @property
    def num_data(self) -> int:
        """The ranks with batches of their own."""
        return self.data_replicate * self.data_parallel

    @property
    def name(self) -> str:
        """The layout with the ZeRO stage, if that is not 3."""
        is_named = self.data_parallel > 1 and self.zero_stage != 3
        return f"{self.layout} with zero_stage {self.zero_stage}" if is_named else self.layout


@dataclasses.dataclass(frozen=True)
class Trial:
    """A dry run of a variant."""

    variant: Variant
    prediction: Prediction
    rows_of_batch: int

    @property
    def rows_of_step(self) -> int:
        return self.rows_of_batch * self.variant.num_data * self.variant.num_batches

    @property
    def step_seconds(self) -> float:
        assert self.prediction.times is not None
        return sum(self.prediction.times.seconds.values())

    @property
    def seconds(self) -> float:
        """The seconds of a row."""
        return self.step_seconds / self.rows_of_step

    @property
    def computing_seconds(self) -> float:
        """The seconds of a row without communication of data-parallel ranks and without the optimizer."""
        assert self.prediction.times is not None
        times = self.prediction.times.seconds
        return (times["compute"] + times["tensor_parallel"]) / self.rows_of_step

    @property
    def bytes(self) -> dict[str, int]:
        """The bytes by category of the phase with the most."""
        return max(self.prediction.phases.values(), key=lambda usage: sum(usage.values()))

    @property
    def peak_bytes(self) -> int:
        return sum(self.bytes.values())

    def to_layout(self, base: Trial, flops_per_second: float) -> FoundLayout:
        """Return the result; `base`: the layout without recomputation, whose operations are those of the model."""
        variant, times, base_times = self.variant, self.prediction.times, base.prediction.times
        assert times is not None and base_times is not None
        return FoundLayout(
            layout=variant.layout,
            sequences=self.rows_of_batch,
            accumulate_grad_batches=variant.num_batches,
            activation_checkpointing=variant.activation_checkpointing,
            optimizer_in_backward=variant.optimizer_in_backward,
            seconds=times.seconds,
            bytes=self.bytes,
            sent_bytes=round(times.sent_bytes),
            throughput=self.rows_of_step / self.step_seconds,
            flops_share=base_times.flops / flops_per_second / self.step_seconds,
            zero_stage=variant.zero_stage,
            sequence_parallel=variant.sequence_parallel,
            pipeline_cuts=self.prediction.cuts,
            pipeline_module=self.prediction.pipeline_module,
            pipeline_schedule=(variant.pipeline_schedule or "") if variant.has_stages else "",
            num_micro_batches=variant.num_micro_batches or 1,
        )


class Trials:
    """Runs each variant once, and remembers the one with the least memory.

    Args:
        global_rows: of a step; None: each data-parallel rank gets the batch as it is.
        stage_options: further options of requests with a pipeline.
        report: called with a sentence before each dry run.
    """

    def __init__(
        self,
        process: DryRunProcess,
        request: Request,
        cluster: Cluster,
        global_rows: int | None,
        stage_options: Mapping[str, Any],
        report: Callable[[str], None],
    ) -> None:
        self.smallest: Trial | None = None
        self._stage_options = stage_options
        self._report = report
        self._num_runs = 0
        self._process = process
        self._request = request
        self._cluster = cluster
        self._global_rows = global_rows
        self._done: dict[Variant, Trial] = {}

    def run(self, variant: Variant) -> Trial:
        """Return the dry run of a variant.

        Raises:
            ValueError: the variant is not valid.
            RuntimeError: the module raised an error.
        """
        if variant in self._done:
            return self._done[variant]
        num_rows = None if self._global_rows is None else self._global_rows // variant.num_data // variant.num_batches
        self._num_runs += 1
        number = f" with {variant.num_micro_batches} micro-batches" if variant.has_stages else ""
        self._report(f"dry run {self._num_runs}: {variant.name}{number}.")
        prediction = self.predict(variant, num_rows=num_rows)
        trial = self._done[variant] = Trial(variant, prediction, num_rows or prediction.num_rows)
        if self.smallest is None or trial.peak_bytes < self.smallest.peak_bytes:
            self.smallest = trial
        return trial

    def try_to_run(self, variant: Variant) -> Trial | None:
        """Run a variant; None: it is not possible, as with one row in a batch norm."""
        try:
            return self.run(variant)
        except ProcessEndedError:
            raise
        except (ValueError, RuntimeError):
            return None

    def predict(self, variant: Variant, *, has_times: bool = True, **options: Any) -> Prediction:
        """Return the prediction for rank 0, whose shards are the largest, or for all ranks of a pipeline.

        Args:
            options: further ones of the request.
        """
        if variant.has_stages:
            names = ("pipeline_schedule", "num_micro_batches")
            options |= {**self._stage_options, **{name: getattr(variant, name) for name in names}}
        request = dataclasses.replace(
            self._request,
            layout=variant.layout,
            rank=None if variant.has_stages and has_times else 0,
            zero_stage=variant.zero_stage,
            accumulate_grad_batches=variant.num_batches,
            activation_checkpointing=variant.activation_checkpointing,
            optimizer_in_backward=variant.optimizer_in_backward,
            sequence_parallel=variant.sequence_parallel,
            **options,
        )
        predictions = self._process.run(request, self._cluster if has_times else None)
        if len(predictions) > 1:
            return of_pipeline(predictions, self._cluster, variant.num_ranks)
        return predictions[0]
