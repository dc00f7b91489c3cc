"""Raises errors for unknown arguments of a public class, with the name of that class.

The classes that users construct are made from mixins (`factory.py`), and Python's own error would name the mixin.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import Any


def checked_init(class_name: str, init: Callable[..., None]) -> Callable[..., None]:
    """Return `init` with the same signature, which raises TypeError for arguments that do not fit it.

    LightningCLI and `inspect` read the signature, so it has no `**kwargs` for unknown arguments.
    """
    signature = inspect.signature(init)
    known = [name for name in signature.parameters if name != "self"]

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        unknown = [name for name in kwargs if name not in known]
        if unknown:
            raise TypeError(_unknown_arguments(class_name, unknown, known))
        try:
            signature.bind(self, *args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{class_name}: {error}; pass its arguments by name: {', '.join(known)}.") from None
        init(self, *args, **kwargs)

    return checked


def _unknown_arguments(class_name: str, unknown: list[str], known: list[str]) -> str:
    text = f"{class_name} got the unknown argument{'s' * (len(unknown) > 1)} "
    nearest = {name: difflib.get_close_matches(name, known, n=1) for name in unknown}
    text += ", ".join(repr(name) + "".join(f" (did you mean {each!r}?)" for each in nearest[name]) for name in unknown)
    return text + ("." if all(nearest.values()) else f"; the known arguments are {', '.join(known)}.")
