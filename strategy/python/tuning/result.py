"""The layouts that a search has found, as a table and as the options of a strategy."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

_AXES = (
    ("pipeline_parallel", "pp"),
    ("data_replicate", "rep"),
    ("data_parallel", "dp"),
    ("expert_parallel", "ep"),
    ("tensor_parallel", "tp"),
)


@dataclasses.dataclass(frozen=True)
class FoundLayout:
    """One layout with its predictions.

    Attributes:
        layout: such as "dp4,tp2".
        sequences: of a batch of each data-parallel rank; for a module, rows: the first dim of its batch's tensors.
        accumulate_grad_batches: batches whose gradients a step accumulates.
        activation_checkpointing: "none", "selective", "full", or "full:8" for the first eight blocks of each rank.
        optimizer_in_backward: whether the optimizer steps in the backward.
        zero_stage: what data-parallel ranks shard, as in the strategies.
        pipeline_cuts: the names of the first module of each stage but the first; () without a pipeline.
        pipeline_module: the name of the submodule that is divided, if a LightningModule was searched.
        pipeline_schedule: "" without a pipeline.
        num_micro_batches: into which a pipeline splits a batch.
        sequence_parallel: whether tensor-parallel ranks shard the tokens between their layers.
        offload: "cpu": optimizer states are in CPU memory; "none": on the device.
        formats: "optimizer_state" and "master_weights", as far as the search has tried several.
        seconds: of a step: "compute", "recomputation" (for a module, a part of "compute"), "tensor_parallel",
            "data_parallel", "optimizer" and, of a pipeline, "pipeline": waits for other stages.
        bytes: by category, at the peak of the rank with the most.
        sent_bytes: that a rank sends in a step.
        throughput: tokens of all ranks per second; for a module, rows.
        flops_share: the model's operations, without recomputation, as a share of those that the devices attain in
            matrix products.
    """

    layout: str
    sequences: int
    accumulate_grad_batches: int
    activation_checkpointing: str
    optimizer_in_backward: bool
    seconds: dict[str, float]
    bytes: dict[str, int]
    sent_bytes: int
    throughput: float
    flops_share: float
    zero_stage: int = 3
    pipeline_cuts: tuple[str, ...] = ()
    pipeline_module: str | None = None
    pipeline_schedule: str = ""
    num_micro_batches: int = 1
    sequence_parallel: bool = False
    offload: str = "none"
    formats: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def step_seconds(self) -> float:
        """The predicted time of a step."""
        return sum(self.seconds.values())

    @property
    def peak_bytes(self) -> int:
        """The bytes of all categories at the peak."""
        return sum(self.bytes.values())

    @property
    def strategy_options(self) -> dict[str, Any]:
        """The arguments of `WeftModelParallelStrategy` that differ from their defaults, except the plan."""
        options: dict[str, Any] = {"layout": self.layout}
        if self.activation_checkpointing != "none":
            options["activation_checkpointing"] = self.activation_checkpointing
        if self.optimizer_in_backward:
            options["optimizer_in_backward"] = True
        if self.offload != "none":
            options["offload"] = {"optimizer": self.offload}
        if self.shards_data and self.zero_stage != 3:
            options["zero_stage"] = self.zero_stage
        if self.sequence_parallel:
            options["sequence_parallel"] = True
        options |= self.formats
        if self.pipeline_cuts:
            options |= {"pipeline_cuts": list(self.pipeline_cuts), "num_micro_batches": self.num_micro_batches}
            if self.pipeline_module is not None:
                options["pipeline_module"] = self.pipeline_module
            if self.pipeline_schedule != "1f1b":
                options["pipeline_schedule"] = self.pipeline_schedule
        return options

    @property
    def shards_data(self) -> bool:
        """Whether the layout has data-parallel ranks, so that `zero_stage` matters."""
        return any(part.startswith("dp") for part in self.layout.split(","))


def layout_text(sizes: Mapping[str, int]) -> str:
    """Return the text of the option `layout` for sizes by axis; "tp1" for one rank."""
    parts = [f"{short}{sizes[axis]}" for axis, short in _AXES if sizes.get(axis, 1) > 1]
    return ",".join(parts) or "tp1"


@dataclasses.dataclass(frozen=True)
class Tuning:
    """The result of a search; prints as a table with the options of the first layout.

    Attributes:
        layouts: those that fit, the fastest first; empty: none fits.
        smallest: if none fits, the layout with the least bytes.
        num_devices, devices_per_host, memory_limit: of the search.
        global_sequences: of a step; None: each data-parallel rank keeps its batch, so that they depend on the layout.
        tokens: of a sequence; None: a module was searched, so that sequences are rows.
        cluster: its name.
        num_candidates: the variants that the search has compared, by their times or by bounds of these.
        num_above_limit: the layouts that need more memory, among those that are faster than the last of `layouts`; if
            there are fewer than wanted, among all.
        rejections: layouts, or sizes such as "tp16", each with the reason why it is not possible.
        plan: the plan's text for a strategy's option, such as "auto".
        precision: that of the Trainer.
        options: further options of the strategy, which the search did not change.
        front: the layouts with checkpoints of all blocks or none that no other beats in both time and memory, whether
            they fit or not, the fastest first; (): they were not asked for.
        has_measured_layers: whether the times of layers were measured; otherwise they follow from rates.
        offload: the values of this option from which the search chooses; (): it is not an option of the search.
        needs_offload: whether offloaded states were tried because no layout fits without.
    """

    layouts: tuple[FoundLayout, ...]
    smallest: FoundLayout | None
    num_devices: int
    devices_per_host: int
    memory_limit: int
    global_sequences: int | None
    tokens: int | None
    cluster: str
    num_candidates: int
    num_above_limit: int
    rejections: tuple[tuple[str, str], ...]
    plan: Any
    precision: str
    options: dict[str, Any]
    front: tuple[FoundLayout, ...] = ()
    has_measured_layers: bool = False
    offload: tuple[str, ...] = ()
    needs_offload: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes as plain data, with "step_seconds" and "peak_bytes" for each layout."""
        found = dataclasses.asdict(self)
        pairs = [*zip(found["layouts"], self.layouts, strict=True), *zip(found["front"], self.front, strict=True)]
        for each, layout in pairs:
            each |= {"step_seconds": layout.step_seconds, "peak_bytes": layout.peak_bytes}
        return found

    def __str__(self) -> str:
        measured = " with measured layer times" if self.has_measured_layers else ""
        devices = f"{self.num_devices} devices of {self.cluster}{measured}, {_gigabytes(self.memory_limit)} each"
        lines = [f"{devices}; {self._work()}; {self.num_candidates} variants compared"]
        if self.smallest is not None:
            return "\n".join([*lines, "", self.no_layout_fits()])
        lines += ["", *_table(self.layouts, "rows/s" if self.tokens is None else "tokens/s")]
        if self.num_above_limit:
            lines.append(f"Variants that need more memory, among those up to the last one: {self.num_above_limit}.")
        if self.rejections:
            sizes, reason = ", ".join(name for name, _ in self.rejections), self.rejections[0][1]
            lines.append(f"Not possible: {sizes} ({reason}).")
        if self.needs_offload:
            lines.append("No layout fits with the optimizer states on the devices: they are in CPU memory.")
        return "\n".join([*lines, "", *self.yaml_lines()])

    def no_layout_fits(self) -> str:
        """Return a sentence with the smallest bytes and what would lower them; `smallest` must not be None."""
        assert self.smallest is not None
        found = self.smallest
        most = max(found.bytes, key=found.bytes.__getitem__)
        further = [] if found.activation_checkpointing == "full" else ["activation_checkpointing: full"]
        activations = ", ".join([*further, "smaller batches or shorter sequences", "or more devices"])
        steps_after = found.optimizer_in_backward or (found.shards_data and found.zero_stage == 1)
        further = [] if steps_after else ["optimizer_in_backward: true"]
        leaves_out = self.offload == ("none",) and self.cluster != "cpu"
        states = ["more devices", *(["offload: cpu"] if leaves_out else []), "or optimizer_state: int8"]
        advice = {
            "parameters": "more devices, or precision bf16-true",
            "gradients": ", ".join([*further, "more devices", "or precision bf16-true"]),
            "optimizer_state": ", ".join(states),
            "saved_activations": activations,
            "scratch": activations,
            "communication": "more devices",
        }.get(most, "more devices")
        return (
            f"No layout fits into {_gigabytes(self.memory_limit)}: the least is {_gigabytes(found.peak_bytes)}, with "
            f"{self._options_text(found)}, most of it {most.replace('_', ' ')}; use {advice}."
        )

    def yaml_lines(self) -> list[str]:
        """Return the lines of a configuration of LightningCLI for the first layout."""
        best = self.layouts[0]
        precision = [f"  precision: {self.precision}"]
        if self.precision == "16-mixed":  # which Lightning refuses beside the object of a strategy
            precision = [
                "  plugins:",
                "    - class_path: lightning.pytorch.plugins.MixedPrecision",
                "      init_args: {precision: 16-mixed, device: cuda}",
            ]
        devices = [f"  devices: {self.num_devices}"]
        if self.num_devices > self.devices_per_host:
            num_hosts, rest = divmod(self.num_devices, self.devices_per_host)
            # The Trainer needs the same number of devices on each host.
            devices = [] if rest else [f"  devices: {self.devices_per_host}", f"  num_nodes: {num_hosts}"]
        lines = [
            "trainer:",
            *(["  accelerator: cpu"] if self.cluster == "cpu" else []),
            *devices,
            *precision,
            f"  accumulate_grad_batches: {best.accumulate_grad_batches}",
            "  strategy:",
            "    class_path: weft.lightning.WeftModelParallelStrategy",
            "    init_args:",
        ]
        options = {"plan": self.plan, **best.strategy_options, **self.options}
        lines += [f"      {name}: {_yaml(value)}" for name, value in options.items()]
        return [*lines, f"# batch size of the loader of each data-parallel rank: {best.sequences}"]

    def _work(self) -> str:
        if self.global_sequences is None:
            return "the same batch for each data-parallel rank"
        if self.tokens is None:
            return f"{self.global_sequences} rows a step"
        return f"{self.global_sequences} sequences of {self.tokens} tokens a step"

    def _rows(self, number: int) -> str:
        return f"{number} {'row' if self.tokens is None else 'sequence'}{'' if number == 1 else 's'}"

    def _options_text(self, layout: FoundLayout) -> str:
        parts = [f"layout {layout.layout}", f"{self._rows(layout.sequences)} in a batch"]
        if layout.activation_checkpointing != "none":
            parts.append(f"{layout.activation_checkpointing} activation checkpointing")
        if layout.optimizer_in_backward:
            parts.append("optimizer_in_backward")
        if layout.offload != "none":
            parts.append(f"offload {layout.offload}")
        if layout.shards_data and layout.zero_stage != 3:
            parts.append(f"zero_stage {layout.zero_stage}")
        if layout.sequence_parallel:
            parts.append("sequence_parallel")
        parts += [f"{name} {value}" for name, value in layout.formats.items()]
        if layout.pipeline_cuts:
            parts.append(f"{layout.num_micro_batches} micro-batches of a pipeline")
        return ", ".join(parts)


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.4g} GB"


def _yaml(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name}: {_yaml(each)}' for name, each in value.items())}}}"
    return str(value).lower() if isinstance(value, bool) else str(value) or "''"


def _table(layouts: tuple[FoundLayout, ...], throughput: str) -> list[str]:
    columns = {
        "layout": [layout.layout for layout in layouts],
        "zero": [str(layout.zero_stage) if layout.shards_data else "-" for layout in layouts],
        "batch": [str(layout.sequences) for layout in layouts],
        "accum.": [str(layout.accumulate_grad_batches) for layout in layouts],
        "pipeline": [_pipeline_text(layout) for layout in layouts],
        "seq. parallel": [_sequence_text(layout) for layout in layouts],
        "checkpoints": [layout.activation_checkpointing for layout in layouts],
        "in backward": ["yes" if layout.optimizer_in_backward else "no" for layout in layouts],
        "offload": [layout.offload for layout in layouts],
        **{name: [layout.formats[name] for layout in layouts] for name in layouts[0].formats},
        "step": [f"{layout.step_seconds:.4g} s" for layout in layouts],
        throughput: [
            f"{layout.throughput:,.0f}" if layout.throughput >= 100 else f"{layout.throughput:.3g}"
            for layout in layouts
        ],
        "of rate": [f"{100 * layout.flops_share:.0f} %" for layout in layouts],
        "memory": [_gigabytes(layout.peak_bytes) for layout in layouts],
        "sent": [_gigabytes(layout.sent_bytes) for layout in layouts],
    }
    if not any(layout.pipeline_cuts for layout in layouts):
        del columns["pipeline"]
    if "yes" not in columns["seq. parallel"] or len(set(columns["seq. parallel"])) == 1:
        del columns["seq. parallel"]
    if all(layout.offload == "none" for layout in layouts):
        del columns["offload"]
    if all(layout.zero_stage == 3 for layout in layouts):
        del columns["zero"]
    cells = [[header, *column] for header, column in columns.items()]
    widths = [max(map(len, column)) for column in cells]
    rows = zip(*cells, strict=True)
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return [line.rstrip() for line in lines]


def _sequence_text(layout: FoundLayout) -> str:
    is_possible = any(part.startswith("tp") and part != "tp1" for part in layout.layout.split(","))
    return "-" if not is_possible else "yes" if layout.sequence_parallel else "no"


def _pipeline_text(layout: FoundLayout) -> str:
    """Return the micro-batches, the schedule and the share of a step in which the busiest rank waits."""
    if not layout.pipeline_cuts:
        return "-"
    waits = layout.seconds["pipeline"] / layout.step_seconds
    return f"{layout.num_micro_batches} x {layout.pipeline_schedule}, waits {100 * waits:.0f} %"
