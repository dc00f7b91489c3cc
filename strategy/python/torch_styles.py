"""torch's ParallelStyle objects in a plan, in weft's styles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.distributed.tensor.parallel.style import ParallelStyle

# (class, layout of the input, of the output) of those that give and take plain tensors.
_STYLES: list[tuple[type[ParallelStyle], Any, Any, str]] = [
    (ColwiseParallel, Replicate(), Shard(-1), "column"),
    (ColwiseParallel, Replicate(), Replicate(), "column_gather_output"),
    (RowwiseParallel, Shard(-1), Replicate(), "row"),
    (RowwiseParallel, Replicate(), Replicate(), "row_split_input"),
]


def without_objects(rules: Mapping[Any, Any]) -> dict[Any, Any]:
    """Rules with the names of styles for torch's objects; others stay.

    Raises:
        ValueError: an object that says something weft has no style for.
    """
    return {
        pattern: _style_of(pattern, value) if isinstance(value, ParallelStyle) else value
        for pattern, value in rules.items()
    }


def _style_of(pattern: Any, value: ParallelStyle) -> str:
    for cls, before, after, style in _STYLES:
        if type(value) is cls and (value.input_layouts, value.output_layouts) == ((before,), (after,)):
            if value.use_local_output:
                return style
            raise ValueError(
                f"plan: pattern '{pattern}' has a {cls.__name__} with use_local_output=False, whose DTensors weft does "
                f"not pass on: write '{style}', with the heads to divide where the code counts them, or apply torch's "
                "plan by parallelize_module in configure_model, which weft leaves as it is."
            )
    raise ValueError(
        f"plan: pattern '{pattern}' has {_shown(value)}, for which weft has no style: pass sequence_parallel=True for "
        "activations cut along the sequence, or apply torch's plan by parallelize_module in configure_model, which "
        "weft leaves as it is."
    )


def _shown(value: ParallelStyle) -> str:
    layouts = [getattr(value, name, None) for name in ("input_layouts", "output_layouts")]
    if None in layouts:
        return f"a {type(value).__name__}"
    return f"a {type(value).__name__} from {layouts[0]} to {layouts[1]}"
