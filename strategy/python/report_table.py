"""The table of what became of each parameter."""

from __future__ import annotations

import dataclasses

from torch import nn
from torch.distributed.tensor import DTensor

from weft.strategy.state import state_of


@dataclasses.dataclass(frozen=True)
class Row:
    """One parameter under one of its names; `num_bytes` are those of this rank's part."""

    parameter: str
    style: str
    local_shape: tuple[int, ...]
    num_bytes: int
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Report:
    """Rows by parameter, and `notes` on what was left alone; prints as a table."""

    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    @property
    def total_bytes(self) -> int:
        """Bytes of this rank's parameters; a tied one counts once."""
        return sum(row.num_bytes for row in self.rows if not row.note.startswith("tied to "))

    def __str__(self) -> str:
        header = ("parameter", "style", "local shape", "bytes", "note")
        table = [
            (row.parameter, row.style, "x".join(map(str, row.local_shape)) or "scalar", f"{row.num_bytes:,}", row.note)
            for row in self.rows
        ]
        table.append(("total", "", "", f"{self.total_bytes:,}", ""))
        widths = [max(len(line[column]) for line in (header, *table)) for column in range(len(header))]
        lines = []
        for line in (header, *table):
            cells = [
                cell.rjust(width) if column == 3 else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(line, widths, strict=True))
            ]
            lines.append("  ".join(cells).rstrip())
        return "\n".join((*lines, *self.notes))


def report(model: nn.Module) -> Report:
    """What became of each parameter of a parallelized model (of any other: its plain parameters).

    Of a wrapper that adds no parameters, such as Fabric's, the parallelized model inside is reported.
    """
    model = _without_wrapper(model)
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
            rows.append(Row(full_name, style, tuple(local.shape), num_bytes, note))
    state = state_of(model)
    return Report(tuple(rows), state.plan_notes if state is not None else ())


def _without_wrapper(model: nn.Module) -> nn.Module:
    """The module that parallelize was called with, if all of the model's parameters are in it; else the model."""

    def is_root(module: nn.Module) -> bool:
        state = state_of(module)
        return state is not None and state.plan_key is not None

    inner = next((module for module in model.modules() if is_root(module)), model)
    return inner if set(inner.parameters()) == set(model.parameters()) else model


def _style_of(module: nn.Module, parameter: nn.Parameter) -> tuple[str, str]:
    state = state_of(module)
    if state is None:
        return ("dtensor" if isinstance(parameter, DTensor) else "plain"), ""
    if state.fused:
        return "column_row_mlp", state.note
    return state.style or "replicate", state.note
