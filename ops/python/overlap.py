"""How sequence-parallel operators communicate: unchunked, or in chunks that overlap communication with computation.

    WEFT_OVERLAP=auto|always|never python train.py       # or weft.overlap.set_mode(...)

`auto`, the default, measures. The first 34 calls of an operator on a kind of shape (see `Choice`) form 17 pairs of one
chunked and one unchunked call, in random order; the first pair is a warm-up. The measurement continues, up to 514
calls, while a rank has fewer than four samples of chunked or of unchunked calls for one of the sizes of its weights.
The ranks then choose chunks if, on every rank and for every size with four samples, the median time of chunked calls is
at most 95 % of that of unchunked calls. The choice, and with it the rounding of a result, may differ from run to run.
`torch.use_deterministic_algorithms(True)` disables the measurement: calls are then unchunked unless a loaded table
chooses chunks. A saved table makes the measurement unnecessary:

    weft.overlap.save("overlap.json")                    # at the end of a run, on one rank
    WEFT_OVERLAP_TABLE=overlap.json python train.py      # on all ranks, or weft.overlap.load(...)
"""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal, TypeGuard, get_args

import torch

from weft import _overlap

__all__ = ["Choice", "Mode", "clear", "load", "mode", "save", "set_mode", "table"]

Mode = Literal["auto", "always", "never"]


@dataclass(frozen=True)
class Choice:
    """The choice for one kind of shape. A row is one position of the sequence, for all samples of the batch.

    Attributes:
        op: the operator, such as "weft::all_gather_linear". The backward, "weft::all_gather_linear backward", has a
            separate choice.
        dtype: such as "float32".
        device: "cpu" or "cuda".
        num_ranks: the number of ranks of the group.
        num_rows: rows of the unsharded sequence, rounded up to a power of two.
        row_bytes: bytes of one row of the widest tensor that is communicated (the input of an all-gather, the output of
            a reduce-scatter), rounded up to a power of two.
        in_pieces: whether the choice is chunked communication.
        ratio: median time of chunked calls over that of unchunked calls, the largest over all ranks and all sizes of
            their weights; 0: there was no measurement, or no weight size occurred often enough.
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
    """Return the mode: "auto", "always" or "never"; initially that of WEFT_OVERLAP."""
    return _overlap.mode()


def set_mode(mode: Mode) -> None:
    """Set the mode, which must be the same on all ranks.

    Args:
        mode: "auto"; "always": chunked if the largest rank's shard has two or more rows; "never": unchunked.

    Raises:
        ValueError: `mode` is not one of these modes.
    """
    if mode not in get_args(Mode):
        raise ValueError(f"weft: got the overlap mode {mode!r}; pass auto, always or never.")
    _overlap.set_mode(mode)


def table() -> list[Choice]:
    """Return the loaded choices and the choices measured on this rank's groups, one for each kind of shape.

    A loaded choice takes precedence; among the choices of several groups, the one with the largest ratio is returned.
    """
    return [Choice(**entry) for entry in _overlap.table()]


def save(path: str | os.PathLike[str]) -> None:
    """Write `table()` as JSON; warns if the table is empty."""
    if not table():
        warnings.warn(
            "weft.overlap.save() has nothing to save: no operator was called often enough in the mode auto on a "
            "sequence long enough for chunks.",
            stacklevel=2,
        )
    Path(path).write_text(json.dumps([asdict(choice) for choice in table()], indent=1) + "\n")


def load(path: str | os.PathLike[str]) -> None:
    """Load the choices that `save` has written, and discard measured ones. All ranks must load the same choices.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not a table of choices.
    """
    _overlap.set_table([asdict(choice) for choice in _read(Path(path))])


def clear() -> None:
    """Discard this rank's measured and loaded choices: the next calls measure again. All ranks must call it."""
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
    error_text = f"weft: got {path}, which is not an overlap table; pass a file that weft.overlap.save has written"
    try:
        entries = json.loads(path.read_text())
    except ValueError as error:  # from the JSON or UTF-8 decoder
        raise ValueError(f"{error_text} ({error}).") from None
    names = [field.name for field in fields(Choice)]
    if not isinstance(entries, list) or any(not isinstance(each, dict) or set(each) != set(names) for each in entries):
        raise ValueError(f"{error_text} (a list of objects with {', '.join(names)}).")
    choices = [Choice(**entry) for entry in entries]
    for choice in choices:
        if name := _wrong_field(choice):
            raise ValueError(f"{error_text} ({name} is {getattr(choice, name)!r}).")
    kinds = [(each.op, each.dtype, each.device, each.num_ranks, each.num_rows, each.row_bytes) for each in choices]
    for kind in kinds:
        if kinds.count(kind) > 1:
            raise ValueError(f"{error_text} (more than one choice for {kind}).")
    return choices


def _wrong_field(choice: Choice) -> str | None:
    """Return the name of the first field with a value that `table()` could not contain."""

    def is_size(value: object) -> TypeGuard[int]:
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
    """Apply WEFT_OVERLAP and WEFT_OVERLAP_TABLE.

    Raises:
        ValueError: WEFT_OVERLAP is not a mode, or the file of WEFT_OVERLAP_TABLE is not a table.
        OSError: the file cannot be read.
    """
    _overlap.mode()  # reads and checks WEFT_OVERLAP
    if path := os.environ.get("WEFT_OVERLAP_TABLE"):
        try:
            load(path)
        except OSError as error:
            raise type(error)(
                f"weft: got WEFT_OVERLAP_TABLE={path}, which cannot be read ({error.strerror}); set it to a file that "
                "weft.overlap.save has written, or unset it."
            ) from None
