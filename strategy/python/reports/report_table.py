"""A table of each parameter's style, sharding and bytes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from weft.strategy.sharding.state import state_of


@dataclasses.dataclass(frozen=True)
class Row:
    """One parameter under one of its names.

    parameter: the full name.
    style: the style of its module, or "plain" or "dtensor" (see `report`).
    note: details of the style, or the name of the parameter that it is tied to.
    rule: the pattern of the plan that gave its module a style (several with commas), "auto", or "" without a rule.
    axes: (mesh axis, dim) for each axis of more than one rank over which it is sharded.
    local_shape, num_bytes: of this rank's shard.
    """

    parameter: str
    style: str
    local_shape: tuple[int, ...]
    num_bytes: int
    note: str = ""
    rule: str = ""
    axes: tuple[tuple[str, int], ...] = ()


@dataclasses.dataclass(frozen=True)
class Report:
    """A row for each name of a parameter, and `notes` on what the plan changed or could not shard; `str`: a table."""

    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    @property
    def total_bytes(self) -> int:
        """Return the bytes of this rank's parameters; a tied one counts once."""
        return sum(row.num_bytes for row in self.rows if not row.note.startswith("tied to "))

    @property
    def rules(self) -> dict[str, list[str]]:
        """Return the names of the parameters of each rule, by `Row.rule`."""
        rules: dict[str, list[str]] = {}
        for row in self.rows:
            if row.rule:
                rules.setdefault(row.rule, []).append(row.parameter)
        return rules

    def to_dict(self) -> dict[str, Any]:
        """Return plain data: "parameters" (a dict for each row), "rules", "total_bytes" and "notes"."""
        parameters = [
            {**dataclasses.asdict(row), "local_shape": list(row.local_shape), "axes": dict(row.axes)}
            for row in self.rows
        ]
        return {
            "parameters": parameters,
            "rules": self.rules,
            "total_bytes": self.total_bytes,
            "notes": list(self.notes),
        }

    def to_json(self) -> str:
        """Return `to_dict` as a JSON object."""
        return json.dumps(self.to_dict())

    def __str__(self) -> str:
        header = ("parameter", "rule", "style", "local shape", "sharded over", "bytes", "note")
        table = [
            (
                row.parameter,
                row.rule,
                row.style,
                "x".join(map(str, row.local_shape)) or "scalar",
                " ".join(f"{axis}:{dim}" for axis, dim in row.axes),
                f"{row.num_bytes:,}",
                row.note,
            )
            for row in self.rows
        ]
        table.append(("total of this rank", "", "", "", "", f"{self.total_bytes:,}", ""))
        return "\n".join((*table_of(header, table, right=("bytes",)), *self.notes))


def table_of(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> list[str]:
    """Return the lines of a table; columns named in `right` are right-aligned, the others left-aligned."""
    widths = [max(len(line[column]) for line in (header, *rows)) for column in range(len(header))]
    lines = []
    for line in (header, *rows):
        cells = [
            cell.rjust(width) if name in right else cell.ljust(width)
            for name, cell, width in zip(header, line, widths, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def report(model: nn.Module) -> Report:
    """Return the report on the parameters of a model.

    The style of parameters in modules that are not parallelized is "plain" or "dtensor". For a wrapper that adds no
    parameters, such as Fabric's, the report is that of the parallelized model inside.
    """
    model = _unwrapped(model)
    rows: list[Row] = []
    first: dict[int, str] = {}
    for module_name, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            full_name = f"{module_name}.{name}" if module_name else name
            local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
            style, note = _style_of(module, parameter)
            if id(parameter) in first:
                note = f"tied to {first[id(parameter)]}"
            first.setdefault(id(parameter), full_name)
            num_bytes = local.numel() * local.element_size()
            owner = state_of(module)
            rule = "" if owner is None else owner.rule
            rows.append(Row(full_name, style, tuple(local.shape), num_bytes, note, rule, _axes(parameter)))
    state = state_of(model)
    return Report(tuple(rows), state.plan_notes if state is not None else ())


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the module that parallelize was called with, if it has all of the model's parameters; else the model."""

    def is_root(module: nn.Module) -> bool:
        state = state_of(module)
        return state is not None and state.plan_key is not None

    inner = next((module for module in model.modules() if is_root(module)), model)
    return inner if set(inner.parameters()) == set(model.parameters()) else model


def _style_of(module: nn.Module, parameter: nn.Parameter) -> tuple[str, str]:
    state = state_of(module)
    if state is None:
        return ("dtensor" if isinstance(parameter, DTensor) else "plain"), ""
    if state.is_layer_of_fused:
        return "column_row_mlp", state.note
    return state.style or "replicate", state.note


def _axes(parameter: nn.Parameter) -> tuple[tuple[str, int], ...]:
    if not isinstance(parameter, DTensor):
        return ()
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or tuple(f"axis{axis}" for axis in range(mesh.ndim))
    axes = zip(names, mesh.shape, parameter.placements, strict=True)
    return tuple((name, _dim(placement)) for name, size, placement in axes if size > 1 and not placement.is_replicate())


def _dim(placement: Any) -> int:
    """Return the dim of a Shard or _StridedShard, which share no base class that declares it."""
    dim: int = placement.dim
    return dim
