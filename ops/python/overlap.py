"""How the operators on a cut sequence communicate: whole, or in pieces that travel while others are multiplied.

    WEFT_OVERLAP=auto|always|never python train.py       # or weft.overlap.set_mode(...)

`auto`, the default, measures on CPUs: the first 18 calls of an operator on a kind of shape take turns, and the ranks
then agree on what was faster. Which is chosen may differ from run to run, and with it the last digits of a result:
`torch.use_deterministic_algorithms(True)` stays with whole, and a table that was saved before spares the measuring:

    weft.overlap.save("overlap.json")                    # at the end of a run, on one rank
    WEFT_OVERLAP_TABLE=overlap.json python train.py      # on all ranks, or weft.overlap.load(...)
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal

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
        num_rows: of the whole sequence.
        row_bytes: of one of its rows, in the widest tensor that travels.
        in_pieces: the choice.
        ratio: time in pieces over whole, on the rank and the layer where it was largest; 0 where nobody measured.
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
    _overlap.set_mode(mode)


def table() -> list[Choice]:
    """What was measured on the groups of this rank so far, and what was loaded."""
    return [Choice(**entry) for entry in _overlap.table()]


def save(path: str | os.PathLike[str]) -> None:
    """Write `table()` as JSON."""
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


def _read(path: Path) -> list[Choice]:
    wanted = f"weft: got {path}, which is no table of overlaps; pass a file that weft.overlap.save has written"
    try:
        choices = [Choice(**entry) for entry in json.loads(path.read_text())]
    except (json.JSONDecodeError, TypeError) as error:
        raise ValueError(f"{wanted} ({error}).") from None
    kinds = {"str": str, "int": int, "bool": bool, "float": (int, float)}
    for choice in choices:
        for field in fields(choice):
            value = getattr(choice, field.name)
            if not isinstance(value, kinds[str(field.type)]):
                raise ValueError(f"{wanted} ({field.name} is {value!r}).")
    return choices


def apply_environment() -> None:
    """Take what WEFT_OVERLAP and WEFT_OVERLAP_TABLE say.

    Raises:
        ValueError: they say something else than a mode, or name something else than a table.
    """
    _overlap.mode()
    if path := os.environ.get("WEFT_OVERLAP_TABLE"):
        load(path)
