"""Converts torch's ParallelStyle objects in a plan to weft's styles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel
from torch.distributed.tensor.parallel.style import ParallelStyle

_TOKENS = (Shard(1), Shard(-2))
# (class, layout of the input, layout of the output, style) of objects with use_local_output=True. In a plan with a
# SequenceParallel, `_layouts` gives Replicate() for shards of tokens, too.
_STYLES: list[tuple[type[ColwiseParallel] | type[RowwiseParallel], Any, Any, str]] = [
    (ColwiseParallel, Replicate(), Shard(-1), "column"),
    (ColwiseParallel, Replicate(), Replicate(), "column_gather_output"),
    (RowwiseParallel, Shard(-1), Replicate(), "row"),
    (RowwiseParallel, Replicate(), Replicate(), "row_split_input"),
]


def replace_torch_styles(rules: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return rules with the names of weft's styles in place of torch's objects; other values do not change.

    With a SequenceParallel, weft shards the activations of the repeated blocks along the sequence, as weft's style
    "sequence_parallel" does. A PrepareModuleInput that only gathers or scatters tokens is then left out: weft moves the
    tokens itself.

    Raises:
        ValueError: weft has no style for an object, or an object has use_local_output=False.
    """
    shards_sequence = any(isinstance(value, SequenceParallel) for value in rules.values())
    styles = {
        pattern: _style_of(pattern, value, shards_sequence) if isinstance(value, ParallelStyle) else value
        for pattern, value in rules.items()
    }
    return {pattern: style for pattern, style in styles.items() if style != ""}


def _style_of(pattern: Any, value: Any, shards_sequence: bool) -> str:
    """Return the style of one object; "": it needs no rule. `shards_sequence`: the plan has a SequenceParallel."""
    if shards_sequence and type(value) is SequenceParallel and value.sequence_sharding[0] in _TOKENS:
        return "sequence_parallel"
    if shards_sequence and type(value) is PrepareModuleInput and _moves_tokens(value):
        return ""
    layouts = [_layouts(value, name, shards_sequence) for name in ("input_layouts", "output_layouts")]
    for cls, before, after, style in _STYLES:
        if type(value) is cls and layouts == [(before,), (after,)]:
            if value.use_local_output:
                return style
            raise ValueError(
                f"plan: pattern '{pattern}' has a {cls.__name__} with use_local_output=False, whose DTensors weft does "
                f"not pass on: write '{style}', with the option heads if the code reads a number of heads from an "
                "attribute, or apply torch's plan by parallelize_module in configure_model, which weft leaves as it is."
            )
    raise ValueError(
        f"plan: pattern '{pattern}' has {_describe(value)}, for which weft has no style: pass sequence_parallel=True "
        "for activations sharded along the sequence, or apply torch's plan by parallelize_module in configure_model, "
        "which weft leaves as it is."
    )


def _layouts(value: ParallelStyle, name: str, shards_sequence: bool) -> tuple[Any, ...]:
    """Return an object's layouts; in a plan with a SequenceParallel, with replicated ones in place of token shards."""
    layouts = getattr(value, name, None) or ()
    return tuple(Replicate() if shards_sequence and layout in _TOKENS else layout for layout in layouts)


def _moves_tokens(value: PrepareModuleInput) -> bool:
    layouts = [*(value.input_layouts or ()), *(value.desired_input_layouts or ())]
    layouts += [*value.input_kwarg_layouts.values(), *value.desired_input_kwarg_layouts.values()]
    return all(layout is None or layout in (Replicate(), *_TOKENS) for layout in layouts)


def _describe(value: ParallelStyle) -> str:
    layouts = [getattr(value, name, None) for name in ("input_layouts", "output_layouts")]
    if None in layouts:
        return f"a {type(value).__name__}"
    return f"a {type(value).__name__} from {layouts[0]} to {layouts[1]}"
