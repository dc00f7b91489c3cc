"""How the operators on a cut sequence communicate: whole, or in pieces that travel while others are multiplied.

    WEFT_OVERLAP=auto|always|never python train.py       # or weft.overlap.set_mode(...)

`auto`, the default, measures on CPUs: the first 34 calls of an operator on a kind of shape take turns, and the ranks
then agree on what was faster. Which is chosen may differ from run to run, and with it the last digits of a result:
under `torch.use_deterministic_algorithms(True)` nothing is measured, and a table that was saved before spares that:

    weft.overlap.save("overlap.json")                    # at the end of a run, on one rank
    WEFT_OVERLAP_TABLE=overlap.json python train.py      # on all ranks, or weft.overlap.load(...)
"""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal, get_args

import torch

from weft import _overlap

__all__ = ["Choice", "Mode", "clear", "load", "mode", "save", "set_mode", "table"]

Mode = Literal["auto", "always", "never"]


@dataclass(frozen=True)
class Choice:
    """What is done for all shapes that round up to the same powers of two.

    Attributes:
        op: the operator; of one with a backward of its own two choices are made.
        dtype: "float32" and the like.
        device: "cpu" or "cuda".
        num_ranks: of the group.
        num_rows: of the whole sequence, rounded up to a power of two.
        row_bytes: of one of its rows, in the widest tensor that travels, rounded up likewise: of the input where it is
            gathered, of the output where it is scattered.
        in_pieces: the choice.
        ratio: time in pieces over whole, on the rank and for the weight where it was largest; 0 where it was not
            measured, or every weight came too seldom.
    """

    op: str
    dtype: str
    device: str
    num_ranks: int
    num_rows: int
    row_bytes: int
    in_pieces: bool
    ratio: float = 0.0


def mode() -> str:
    """The mode: "auto", "always" or "never"; at first what the environment says as WEFT_OVERLAP."""
    return _overlap.mode()


def set_mode(mode: Mode) -> None:
    """Set the mode, on all ranks to the same.

    Args:
        mode: "auto"; "always": in pieces wherever a rank's part has two rows; "never": whole.

    Raises:
        ValueError: for any other.
    """
    if mode not in get_args(Mode):
        raise ValueError(f"weft: got the overlap mode {mode!r}; pass auto, always or never.")
    _overlap.set_mode(mode)


def table() -> list[Choice]:
    """What was loaded, and what was measured on the groups of this rank so far: of several the largest ratio."""
    return [Choice(**entry) for entry in _overlap.table()]


def save(path: str | os.PathLike[str]) -> None:
    """Write `table()` as JSON; warns where that is empty."""
    if not table():
        warnings.warn(
            "weft.overlap.save() has nothing to save: no operator was called often enough in the mode auto on a "
            "sequence that is cut into pieces.",
            stacklevel=2,
        )
    Path(path).write_text(json.dumps([asdict(choice) for choice in table()], indent=1) + "\n")


def load(path: str | os.PathLike[str]) -> None:
    """Take the choices of a file that `save` has written, and forget what was measured; on all ranks the same.

    Raises:
        ValueError: the file holds something else.
    """
    _overlap.set_table([asdict(choice) for choice in _read(Path(path))])


def clear() -> None:
    """Forget what was measured and loaded, on all ranks: the next calls measure anew."""
    _overlap.set_table([])


_OPERATORS = frozenset(
    f"weft::{name}"
    for name in (
        "all_gather_linear",
        "all_gather_linear backward",
        "linear_reduce_scatter",
        "linear_reduce_scatter backward",
        "column_row_mlp",
    )
)


def _read(path: Path) -> list[Choice]:
    wanted = f"weft: got {path}, which is no table of overlaps; pass a file that weft.overlap.save has written"
    try:
        entries = json.loads(path.read_text())
    except ValueError as error:  # of JSON or UTF-8
        raise ValueError(f"{wanted} ({error}).") from None
    names = [field.name for field in fields(Choice)]
    if not isinstance(entries, list) or any(not isinstance(each, dict) or set(each) != set(names) for each in entries):
        raise ValueError(f"{wanted} (a list of objects with {', '.join(names)}).")
    choices = [Choice(**entry) for entry in entries]
    for choice in choices:
        if name := _wrong_field(choice):
            raise ValueError(f"{wanted} ({name} is {getattr(choice, name)!r}).")
    kinds = [(each.op, each.dtype, each.device, each.num_ranks, each.num_rows, each.row_bytes) for each in choices]
    for kind in kinds:
        if kinds.count(kind) > 1:
            raise ValueError(f"{wanted} (more than one choice for {kind}).")
    return choices


def _wrong_field(choice: Choice) -> str | None:
    """The first field that `table()` could not have."""

    def is_size(value: object) -> bool:
        return type(value) is int and 0 < value < 2**62

    def is_rounded(value: object) -> bool:
        return is_size(value) and value & (value - 1) == 0

    checks = {
        "op": choice.op in _OPERATORS,
        "dtype": isinstance(getattr(torch, str(choice.dtype), None), torch.dtype),
        "device": choice.device in ("cpu", "cuda"),
        "num_ranks": is_size(choice.num_ranks) and choice.num_ranks > 1,
        "num_rows": is_rounded(choice.num_rows),
        "row_bytes": is_rounded(choice.row_bytes),
        "in_pieces": isinstance(choice.in_pieces, bool),
        "ratio": type(choice.ratio) in (int, float) and 0 <= choice.ratio < float("inf"),
    }
    return next((name for name, is_right in checks.items() if not is_right), None)


def apply_environment() -> None:
    """Take what WEFT_OVERLAP and WEFT_OVERLAP_TABLE say.

    Raises:
        ValueError: they say something else than a mode, or name something else than a table.
        OSError: the table cannot be read.
    """
    _overlap.mode()
    if path := os.environ.get("WEFT_OVERLAP_TABLE"):
        try:
            load(path)
        except OSError as error:
            raise type(error)(
                f"weft: got WEFT_OVERLAP_TABLE={path}, which cannot be read ({error.strerror}); set it to a file that "
                "weft.overlap.save has written, or leave it away."
            ) from None
