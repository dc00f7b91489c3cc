"""Predicts the memory of each rank of a training, from a configuration, without allocating it.

The C++ memory model (weft/strategy/memory_model.h) predicts all phases of a training of Llama-like models and MLPs,
without torch. For other models of Hugging Face, for the plan "huggingface", and for pipelines whose stages do not begin
at blocks, the estimate has the bytes of parameters, gradients and optimizer states, which are counted on a model on the
meta device (`state.py`).
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.strategy import _plan
from weft.strategy.estimate.config import PIPELINE_AXIS, Training, axis_size, load_file, read_config
from weft.strategy.estimate.stages import why_not_described

_UNITS = {"GB": 9, "MB": 6, "kB": 3}  # decimal exponents
_ONE_MLP = _plan.FeedForwardModel(dim=1, hidden_dim=1)
_NO_ACTIVATIONS = "activations and temporaries are not predicted for {}: the figures are persistent bytes"


@dataclasses.dataclass(frozen=True)
class RankEstimate:
    """The prediction for one rank.

    Attributes:
        rank: the global rank.
        num_ranks: the number of ranks with the same figures, this one included.
        phases: bytes by phase, then by category.
        offloaded_bytes: of CPU memory for offloaded optimizer states; the phases do not have them.
    """

    rank: int
    num_ranks: int
    phases: dict[str, dict[str, int]]
    offloaded_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """The bytes of all categories in the largest phase."""
        return max(sum(usage.values()) for usage in self.phases.values())


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The result of `estimate`; prints as a table.

    Attributes:
        num_parameters: of the full model; tied parameters count once.
        bytes_per_parameter: the bytes of one element of a parameter in training: the element, its gradient, its
            optimizer state, unless it is offloaded, and autocast's copy of it.
        mesh: as `Mesh` prints it.
        ranks: one of each set of ranks with equal figures.
        cuts: the names of the first module of each stage but the first, if weft has chosen them; else ().
        note: a sentence on the categories that are not predicted, in which case the figures are lower bounds; "": none.
    """

    num_parameters: int
    bytes_per_parameter: float
    mesh: str
    ranks: tuple[RankEstimate, ...]
    note: str = ""
    cuts: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes as plain data, with "peak_bytes" for each rank."""
        return {
            "num_parameters": self.num_parameters,
            "bytes_per_parameter": self.bytes_per_parameter,
            "mesh": self.mesh,
            "ranks": [{**dataclasses.asdict(rank), "peak_bytes": rank.peak_bytes} for rank in self.ranks],
            "note": self.note,
            "cuts": list(self.cuts),
        }

    def __str__(self) -> str:
        total_bytes = round(self.num_parameters * self.bytes_per_parameter)
        unit, exponent = unit_of(max(rank.peak_bytes for rank in self.ranks))
        lines = [
            f"{self.num_parameters:,} parameters, {self.bytes_per_parameter:g} bytes each in training: "
            f"{in_unit(unit, total_bytes)} {unit} in all; mesh {self.mesh or 'of one rank'}; "
            f"{unit} = 1e{exponent} bytes"
        ]
        lines += [f"later stages begin at {', '.join(self.cuts)}"] if self.cuts else []
        lines += ["", self.note] if self.note else []
        for rank in self.ranks:
            bound = "at least" if self.note else "at most"
            like = f" and {rank.num_ranks - 1} like it" if rank.num_ranks > 1 else ""
            peak = f"{in_unit(unit, rank.peak_bytes)} {unit}"
            if rank.offloaded_bytes:
                peak += f", and {in_unit(unit, rank.offloaded_bytes)} {unit} of CPU memory for optimizer states"
            lines += ["", f"rank {rank.rank}{like}: {bound} {peak}", *table_of(rank.phases, unit)]
        return "\n".join(lines)


def table_of(phases: Mapping[str, Mapping[str, int]], unit: str) -> list[str]:
    """Return the lines of a table with a row for each phase and a column for each category."""
    categories = list(next(iter(phases.values())))
    header = ["phase", "total", *(name.replace("_", " ") for name in categories)]
    rows = [
        [phase, *(in_unit(unit, size) for size in (sum(usage.values()), *usage.values()))]
        for phase, usage in phases.items()
    ]
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    return [
        "  ".join(cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(cells)).rstrip()
        for cells in (list(zip(row, widths, strict=True)) for row in (header, *rows))
    ]


def unit_of(num_bytes: int) -> tuple[str, int]:
    """Return the largest unit that is not above a number of bytes, else the smallest, and its decimal exponent."""
    return next((item for item in _UNITS.items() if num_bytes >= 10 ** item[1]), ("kB", _UNITS["kB"]))


def in_unit(unit: str, num_bytes: int) -> str:
    """Return a number of bytes in a unit, with three decimals."""
    value = num_bytes / 10 ** _UNITS[unit]
    return f"{value:.3f}" if value >= 5e-4 or value == 0 else "<0.001"


def estimate(spec: _plan.TrainingSpec, mesh: _plan.Mesh) -> Estimate:
    """Return the bytes of each set of ranks with equal figures, for a training that the memory model predicts.

    Raises:
        ValueError: the parts of the training do not fit together.
    """
    num_parameters, bytes_per_parameter = spec.parameter_cost()
    ranks = tuple(
        RankEstimate(rank, num_alike, spec.predict(rank), spec.offloaded_bytes(rank))
        for rank, num_alike in spec.distinct_ranks()
    )
    return Estimate(num_parameters, bytes_per_parameter, str(mesh), ranks)


def estimate_file(path: str | Path, *, layout: str | None = None) -> Estimate:
    """Return the estimate for a YAML or JSON configuration, as docs/estimate_memory.md describes it.

    Args:
        layout: such as "pp2,dp2,tp2"; replaces the configuration's mesh or layout.

    Raises:
        ValueError: the file does not exist, or its content is not a valid configuration.
    """
    path = Path(path)
    return estimate_training(read_config(load_file(path), path.parent, layout))


def estimate_training(training: Training) -> Estimate:
    """Return the bytes of each set of ranks with equal figures, with a note if categories are not predicted.

    Raises:
        ValueError: the parts of the training do not fit together, or transformers cannot build its model.
    """
    chosen: tuple[str, ...] = ()
    if training.pipeline is not None and training.pipeline.cuts is None:
        training = _module_with_torch().with_chosen_cuts(training)
        assert training.pipeline is not None and training.pipeline.cuts is not None
        chosen = training.pipeline.cuts
    reason = why_not_described(training)
    found = _estimate_state(training, reason) if reason else estimate(training.full_spec(), training.mesh)
    return dataclasses.replace(found, cuts=chosen)


def _estimate_state(training: Training, reason: str) -> Estimate:
    """Return the persistent bytes of each rank; `reason`: why activations are not predicted."""
    if training.options.get("zero_stage", 3) != 3:
        raise ValueError(
            f"zero_stage is {training.options['zero_stage']!r}, which is not predicted for {reason}; leave it out, or "
            "use --module."
        )
    if training.options.get("offload", "none") != "none":
        raise ValueError(
            f"offload is {training.options['offload']!r}, which is not predicted for {reason}; leave it out, and "
            "subtract the optimizer states."
        )
    other_axes = _plan.Mesh([(axis, size) for axis, size in training.mesh.axes if axis != PIPELINE_AXIS])
    # Raises for unknown names. Sequence parallelism, which one MLP does not have, changes no persistent bytes.
    training.spec(_ONE_MLP, other_axes, sequence_parallel=False)
    # Raises for axes and combinations of options that are not supported; one MLP has no blocks to checkpoint.
    alone = training.spec(_ONE_MLP, other_axes, activation_checkpointing="none", sequence_parallel=False)
    _, bytes_per_parameter = alone.parameter_cost()
    found = _module_with_torch().state_of_ranks(training)
    by_figures: dict[tuple[int, ...], RankEstimate] = {}
    tp_size = axis_size(training.mesh, "tensor_parallel")
    ranks_per_usage = training.mesh.size() // len(found.usages)
    for i, usage in enumerate(found.usages):
        phases = {"init": {**dict.fromkeys(usage, 0), "parameters": usage["parameters"]}, "step": usage}
        coordinates = {PIPELINE_AXIS: i // tp_size, "tensor_parallel": i % tp_size}
        rank = training.mesh.rank([coordinates.get(axis, 0) for axis, _ in training.mesh.axes])
        key = tuple(size for each in phases.values() for size in each.values())
        before = by_figures.setdefault(key, RankEstimate(rank, 0, phases))
        by_figures[key] = dataclasses.replace(before, num_ranks=before.num_ranks + ranks_per_usage)
    note = _NO_ACTIVATIONS.format(reason)
    mesh = str(training.mesh)
    return Estimate(found.num_parameters, bytes_per_parameter, mesh, tuple(by_figures.values()), note)


def _module_with_torch() -> Any:
    try:
        return importlib.import_module("weft.strategy.estimate.state")
    except ImportError as error:
        raise ValueError(
            f"the memory of this training is counted on a model of transformers, which needs torch ({error}); install "
            "torch and transformers, or give a configuration of llama, mistral or qwen2 without the plan "
            "huggingface, and with pipeline_cuts at blocks."
        ) from error
