"""The result of a comparison, as a value that prints."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from weft.strategy.reports.report_table import table_of

_MAX_ROWS = 10  # parameters in the printed table


@dataclasses.dataclass(frozen=True)
class StepLoss:
    """The loss of one step on both sides.

    step: from 1.
    sharded, unsharded: means over the data-parallel ranks' batches.
    difference: the largest relative difference of the loss on any rank.
    """

    step: int
    sharded: float
    unsharded: float
    difference: float


@dataclasses.dataclass(frozen=True)
class ParameterDifference:
    """The largest differences of one parameter and of its gradient over all steps and ranks.

    style, rule, note: as in `weft.strategy.report`.
    axes: (mesh axis, dim) for each mesh axis of more than one rank over which the parameter is sharded.
    gradient, weight: the norm of the difference, relative to the unsharded norm or to a thousandth of the norm of all
        gradients (weights), whichever is larger; inf if a value is not finite, None if no step was completed.
    """

    parameter: str
    style: str
    rule: str
    note: str
    axes: tuple[tuple[str, int], ...]
    gradient: float | None = None
    weight: float | None = None

    @property
    def largest(self) -> float:
        """Return the larger of the two differences; 0 if no step was completed."""
        return max(self.gradient or 0.0, self.weight or 0.0)


@dataclasses.dataclass(frozen=True)
class OutputDifference:
    """The module whose output is the first to differ in the first forward, in the order in which forwards return.

    module, kind: the module's name and class.
    position: the output's place in that order, from 0.
    difference: the norm of the difference, relative to the norm of the unsharded output; if a rank has only a shard of
        the output, both norms are of this shard.
    """

    module: str
    kind: str
    position: int
    difference: float


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A model trained with a layout and a plan, against the same model unsharded; prints as tables and a verdict.

    Attributes:
        setting: one line on the model and the training.
        tolerance: the largest relative difference that counts as agreement.
        tolerance_note: why the tolerance is larger than the default of the dtype; "": it is not.
        losses: by step.
        parameters: by largest difference; after a failure, those inside the failing module first.
        first_output: the first module whose output differs; None: no compared output of the first forward differs.
        failure: the error of the sharded model and the module that raised it; "": none.
        draws_random_numbers: whether the unsharded forward draws from torch's CPU generator, as CPU dropout does.
        notes: notes of `weft.strategy.report`, and a note on replicated gradients that differ between ranks; printed if
            the two sides differ.
        in_eval_mode: the comparison in eval mode, if the two sides differ in train mode, `draws_random_numbers` is True
            and there is no failure; else None.
    """

    setting: str
    tolerance: float
    tolerance_note: str
    losses: tuple[StepLoss, ...]
    parameters: tuple[ParameterDifference, ...]
    first_output: OutputDifference | None = None
    failure: str = ""
    draws_random_numbers: bool = False
    notes: tuple[str, ...] = ()
    in_eval_mode: Comparison | None = None

    @property
    def largest(self) -> float:
        """Return the largest difference of all losses, gradients and weights."""
        return max((*(loss.difference for loss in self.losses), *(row.largest for row in self.parameters)), default=0.0)

    @property
    def agrees(self) -> bool:
        """Return whether the sharded model raised no error and all differences are within the tolerance."""
        return not self.failure and self.largest <= self.tolerance

    @property
    def verdict(self) -> str:
        """Return the result in one line."""
        allowed = f"(tolerance {self.tolerance:g}{self.tolerance_note})"
        if self.failure:
            return f"differ: {self.failure}"
        if self.agrees:
            return f"agree to {_format_difference(self.largest)} {allowed}"
        worst = max(self.parameters, key=lambda row: row.largest, default=None)
        if worst is None or worst.largest <= self.tolerance:
            where = f"the losses, {self.largest:.1e}"
        else:
            where = f"largest at {worst.parameter}: {worst.largest:.1e}"
        text = f"differ: {where} {allowed}; {self._first_output_text()}"
        in_eval = self.in_eval_mode
        if in_eval is None:
            return text
        if in_eval.agrees:
            return (
                f"{text}. Random numbers are the reason: in eval mode, without dropout, they agree to "
                f"{in_eval.largest:.1e}; compare with mode='eval'"
            )
        return f"{text}. Random numbers are not the only reason: in eval mode, without dropout, they {in_eval.verdict}"

    def _first_output_text(self) -> str:
        first = self.first_output
        if first is None and any(loss.difference > self.tolerance for loss in self.losses[:1]):
            return (
                "the outputs of all modules in the first forward agree, and its loss does not: code outside of "
                "modules probably reads a tensor, such as an attribute, of which a rank has only a shard"
            )
        if first is None:
            return "the outputs of the first forward agree"
        return f"the first output to differ is that of '{first.module}' ({first.kind}): {first.difference:.1e}"

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes, "largest", "agrees" and "verdict" as plain data; None for infinities and NaN."""
        found = dataclasses.asdict(self)
        for row, entry in zip(self.parameters, found["parameters"], strict=True):
            entry["axes"] = dict(row.axes)
        in_eval_mode = None if self.in_eval_mode is None else self.in_eval_mode.to_dict()
        found |= {"in_eval_mode": in_eval_mode, "largest": self.largest}
        return {**_to_finite(found), "agrees": self.agrees, "verdict": self.verdict}

    def __str__(self) -> str:
        lines = [self.setting]
        if self.losses:
            header = ("step", "sharded loss", "unsharded loss", "difference")
            rows = [
                (str(loss.step), f"{loss.sharded:.9g}", f"{loss.unsharded:.9g}", _format_difference(loss.difference))
                for loss in self.losses
            ]
            lines += ["", *table_of(header, rows, right=header)]
        parameter_rows = [
            (
                row.parameter,
                row.style,
                " ".join(f"{axis}:{dim}" for axis, dim in row.axes),
                _format_difference(row.gradient),
                _format_difference(row.weight),
                row.note,
            )
            for row in self.parameters[:_MAX_ROWS]
        ]
        if parameter_rows:
            columns = ("parameter", "style", "sharded over", "gradient", "weight", "note")
            lines += ["", *table_of(columns, parameter_rows, right=("gradient", "weight"))]
        if rest := self.parameters[_MAX_ROWS:]:
            lines.append(f"and {len(rest)} more, at most {_format_difference(max(row.largest for row in rest))}")
        notes = () if self.agrees else self.notes
        return "\n".join((*lines, "", *notes, self.verdict))


def _format_difference(difference: float | None) -> str:
    return "-" if difference is None else f"{difference:.1e}" if difference else "0"


def _to_finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _to_finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
