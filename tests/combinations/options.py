"""The options and layouts whose combinations are tested."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

# With the number of ranks; the page has the first ones.
LAYOUTS = {"tp2": 2, "dp2": 2, "cp2": 2, "dp2,tp2": 4, "cp2,tp2": 4, "pp2": 2, "pp2,tp2": 4}
ALL_LAYOUTS = {**LAYOUTS, "pp2,dp2": 4, "pp2,cp2": 4}


@dataclasses.dataclass(frozen=True)
class Option:
    """One option that deviates from its default.

    Attributes:
        strategy: arguments of the strategy.
        trainer: arguments of the Trainer.
        axes: the axes without which the option does not exist: "dp", "cp", "tp" or "pp"; one is enough.
        changes_results: whether the results are others than without the option, on one device, too.
        is_low: whether the results are rounded to half precision or less.
    """

    strategy: dict[str, Any] = dataclasses.field(default_factory=dict)
    trainer: dict[str, Any] = dataclasses.field(default_factory=dict)
    axes: tuple[str, ...] = ()
    changes_results: bool = False
    is_low: bool = False


def _strategy(*axes: str, **arguments: Any) -> Option:
    return Option(strategy=arguments, axes=axes)


def _trainer(is_low: bool = False, **arguments: Any) -> Option:
    return Option(trainer=arguments, changes_results=True, is_low=is_low)


OPTIONS: dict[str, Option] = {
    "zero_stage=0": _strategy("dp", "cp", zero_stage=0),
    "zero_stage=1": _strategy("dp", "cp", zero_stage=1),
    "zero_stage=2": _strategy("dp", "cp", zero_stage=2),
    "sequence_parallel=True": _strategy("tp", sequence_parallel=True),
    'context_attention="ulysses"': _strategy("cp", context_attention="ulysses"),
    'pipeline_schedule="zero_bubble"': _strategy("pp", pipeline_schedule="zero_bubble"),
    'pipeline_schedule="interleaved"': _strategy(
        "pp", pipeline_schedule="interleaved", pipeline_cuts=["layers.1", "layers.2", "layers.3"]
    ),
    'pipeline_schedule="zbv"': _strategy(
        "pp", pipeline_schedule="zbv", pipeline_cuts=["layers.1", "layers.2", "layers.3"]
    ),
    "optimizer_in_backward=True": _strategy(optimizer_in_backward=True),
    'optimizer_in_backward="rows"': _strategy(optimizer_in_backward="rows"),
    'activation_checkpointing="full"': _strategy(activation_checkpointing="full"),
    'activation_checkpointing="selective"': _strategy(activation_checkpointing="selective"),
    'compile={"backend": "aot_eager"}': _strategy(compile={"backend": "aot_eager"}),
    'optimizer_state="bfloat16"': Option({"optimizer_state": "bfloat16"}, changes_results=True, is_low=True),
    'optimizer_state="int8"': Option({"optimizer_state": "int8"}, changes_results=True, is_low=True),
    'master_weights="split"': Option(
        {"master_weights": "split"}, {"precision": "bf16-mixed"}, changes_results=True, is_low=True
    ),
    'offload={"optimizer": "disk:/tmp"}': _strategy(offload={"optimizer": "disk:/tmp"}),
    'offload={"optimizer": "cpu"}': _strategy(offload={"optimizer": "cpu"}),
    'offload={"parameters": "cpu"}': _strategy("dp", "cp", offload={"parameters": "cpu"}),
    "join_gate_up=True": _strategy(join_gate_up=True),
    "fused_optimizers=False": _strategy(fused_optimizers=False),
    "empty_init=False": _strategy(empty_init=False),
    'precision="bf16-mixed"': _trainer(is_low=True, precision="bf16-mixed"),
    'precision="bf16-true"': _trainer(is_low=True, precision="bf16-true"),
    'precision="16-mixed"': _trainer(is_low=True, precision="16-mixed"),
    "accumulate_grad_batches=2": _trainer(accumulate_grad_batches=2),
    "clipping by norm": _trainer(gradient_clip_val=0.5),
    "clipping by value": _trainer(gradient_clip_val=0.01, gradient_clip_algorithm="value"),
}


@dataclasses.dataclass(frozen=True)
class Combination:
    """One or two options on one layout; `names` in the order of OPTIONS."""

    layout: str
    names: tuple[str, ...]

    @property
    def world_size(self) -> int:
        return ALL_LAYOUTS[self.layout]

    @property
    def options(self) -> tuple[Option, ...]:
        return tuple(OPTIONS[name] for name in self.names)

    @property
    def reference(self) -> tuple[str, ...]:
        """Return the options that a run on one device needs for the same results."""
        return tuple(name for name in self.names if OPTIONS[name].changes_results)

    @property
    def is_low(self) -> bool:
        return any(option.is_low for option in self.options)


def option_names(layout: str) -> list[str]:
    """Return the options that exist on a layout, in the order of OPTIONS."""
    return [name for name, option in OPTIONS.items() if not option.axes or any(axis in layout for axis in option.axes)]


def combinations(layout: str) -> Iterator[Combination]:
    """Yield each option alone, then each pair whose arguments do not contradict each other."""
    names = option_names(layout)
    for pair in itertools.chain(((name,) for name in names), itertools.combinations(names, 2)):
        if not _contradict(*(OPTIONS[name] for name in pair)):
            yield Combination(layout, pair)


def _contradict(first: Option, second: Option | None = None) -> bool:
    if second is None:
        return False
    pairs = ((first.strategy, second.strategy), (first.trainer, second.trainer))
    return any(one[key] != other[key] for one, other in pairs for key in one.keys() & other.keys())
