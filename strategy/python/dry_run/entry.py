"""`estimate_module`: predicts the memory of a rank by a dry run in a new process."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from weft.strategy.dry_run.process import DryRunProcess
from weft.strategy.dry_run.request import Request
from weft.strategy.dry_run.training import Prediction
from weft.strategy.estimate.entry import in_unit, table_of, unit_of


@dataclasses.dataclass(frozen=True)
class RankEstimate:
    """The bytes of one rank.

    Attributes:
        rank: the global rank.
        stages: the rank's stages of the pipeline; () without a pipeline.
        phases: bytes by phase ("init", "forward", "backward", "step"), then by category of `weft.memory`.
        unmeasured: the operators with calls whose tensors are too large for a measurement of the temporaries inside.
    """

    rank: int
    stages: tuple[int, ...]
    phases: dict[str, dict[str, int]]
    unmeasured: tuple[str, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """The bytes of all categories in the largest phase."""
        return max(sum(usage.values()) for usage in self.phases.values())

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes as plain data, with "peak_bytes"."""
        lists = {"stages": list(self.stages), "unmeasured": list(self.unmeasured)}
        return {**dataclasses.asdict(self), **lists, "peak_bytes": self.peak_bytes}

    def lines(self, unit: str) -> list[str]:
        """Return the lines of a table."""
        stages = f", stage {', '.join(map(str, self.stages))}" if self.stages else ""
        lines = [f"rank {self.rank}{stages}: {in_unit(unit, self.peak_bytes)} {unit}", *table_of(self.phases, unit)]
        if self.unmeasured:
            lines += ["", f"without the temporaries inside large calls of {', '.join(self.unmeasured)}"]
        return lines


@dataclasses.dataclass(frozen=True)
class DryRunEstimate:
    """The result of `estimate_module`; prints as a table for each rank.

    Attributes:
        num_parameters: of the full model; tied parameters count once.
        layout: as given.
        cuts: the names of the first module of each stage but the first, in the divided module; () without a pipeline.
        ranks: the ranks that were played, in the order of their numbers.
        assumes_balanced_routing: whether the training chooses experts; here, all are chosen equally often.
    """

    num_parameters: int
    layout: str
    cuts: tuple[str, ...]
    ranks: tuple[RankEstimate, ...]
    assumes_balanced_routing: bool = False

    @property
    def largest(self) -> RankEstimate:
        """The rank with the largest peak, and of several the first."""
        return max(self.ranks, key=lambda each: each.peak_bytes)

    @property
    def phases(self) -> dict[str, dict[str, int]]:
        """The phases of the largest rank."""
        return self.largest.phases

    @property
    def peak_bytes(self) -> int:
        """The peak of the largest rank."""
        return self.largest.peak_bytes

    def to_dict(self) -> dict[str, Any]:
        """Return plain data: the attributes, and those of the largest rank; "ranks" and "cuts" only for a pipeline."""
        found = {"num_parameters": self.num_parameters, "layout": self.layout, **self.largest.to_dict()}
        found["assumes_balanced_routing"] = self.assumes_balanced_routing
        if self.cuts:
            return {**found, "cuts": list(self.cuts), "ranks": [each.to_dict() for each in self.ranks]}
        del found["stages"]
        return found

    def __str__(self) -> str:
        unit, exponent = unit_of(self.peak_bytes)
        lines = [f"{self.num_parameters:,} parameters; layout {self.layout}; {unit} = 1e{exponent} bytes"]
        if self.cuts:
            lines.append(f"later stages begin at {', '.join(self.cuts)}")
        if self.assumes_balanced_routing:
            lines.append("routing is assumed to be balanced: each expert gets equally many tokens")
        for each in self.ranks:
            lines += ["", *each.lines(unit)]
        return "\n".join(lines)


def estimate_module(module: Any, layout: str = "tp1", **options: Any) -> DryRunEstimate:
    """Return the bytes of ranks that train a module, by dry runs: trainings on tensors without values.

    The dry run is a new process of this host, which needs the memory of one operator at a time, and as many threads as
    the ranks will have (OMP_NUM_THREADS). A script must call this function under `if __name__ == "__main__"`.

    Args:
        module: an nn.Module or a LightningModule; a callable without arguments that builds one; or the
            "package.module:name" of either. Only a callable is never built with values.
        layout: the sizes of the axes, as in the Lightning strategies: "tp2", "dp2,tp2", "pp2,rep2,dp2,tp2".
        options: keyword arguments.

            - batch: the batch of one data-parallel rank, a callable that makes it, or the "package.module:name" of
              either. None: as in `weft.strategy.compare`.
            - plan, sequence_parallel, context_attention, zero_stage, activation_checkpointing ("none", "selective",
              "full", "full:8"), optimizer_in_backward, fused_optimizers, optimizer_state, master_weights: as in the
              strategies.
            - accumulate_grad_batches: batches whose gradients a step accumulates; 1 with a pipeline.
            - precision: "32-true", "bf16-mixed", "bf16-true" or "16-true".
            - loss_fn: as in `weft.strategy.compare`.
            - optimizer: the name of a class of torch.optim, or a function (module) -> optimizer, or its
              "package.module:name". None: the optimizer of `configure_optimizers`, or AdamW.
            - pipeline_cuts: the names of the first module of each stage but the first, as a list or with commas; None
              or "auto": weft chooses them.
            - pipeline_schedule ("1f1b" by default), num_micro_batches, pipeline_module: as in the strategies.
            - rank: the global rank to predict. None: rank 0, which has the largest shards; for a pipeline, the first
              rank of each position in it.
            - num_steps: the number of steps, 3 by default; all steps after the second have the same peaks.

    Raises:
        ValueError: an argument is invalid or does not fit the model, or the training needs values, such as a tensor
            whose shape depends on them.
        RuntimeError: the module raised an error, or the process ended.
    """
    return estimate_all([Request(module, layout, **options)])[0]


def estimate_all(requests: Sequence[Request]) -> list[DryRunEstimate]:
    """Return the result of `estimate_module` for each request, from one process. Raises the first error."""
    with DryRunProcess() as process:
        return [_estimate_of(request, process.run(request)) for request in requests]


def _estimate_of(request: Request, ranks: Sequence[Prediction]) -> DryRunEstimate:
    return DryRunEstimate(
        ranks[0].num_parameters,
        request.layout,
        ranks[0].cuts,
        tuple(RankEstimate(each.rank, each.stages, each.phases, each.unmeasured) for each in ranks),
        any(each.assumes_balanced_routing for each in ranks),
    )
