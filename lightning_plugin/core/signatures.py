"""Makes `__init__` of the classes that users construct: explicit signature, docstring, errors with the class's name.

These classes are made from mixins (`factory.py`), and Python's own errors would name the mixin. Signatures have no
`**kwargs`, because LightningCLI and `inspect` read them.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import re
import typing
from collections.abc import Callable, Collection, Sequence
from typing import Any


def checked_init(class_name: str, init: Callable[..., None]) -> Callable[..., None]:
    """Return `init` wrapped so that arguments that do not fit its signature raise TypeError with `class_name`."""
    signature = inspect.signature(init)
    known = [name for name in signature.parameters if name != "self"]

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        unknown = [name for name in kwargs if name not in known]
        if unknown:
            raise TypeError(_unknown_arguments_text(class_name, unknown, known))
        try:
            signature.bind(self, *args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{class_name}: {error}; pass its arguments by name: {', '.join(known)}.") from None
        init(self, *args, **kwargs)

    return checked


def init_of_options(
    class_name: str, configure: Callable[..., None], groups: Sequence[type], omitted: Collection[str] = ()
) -> Callable[..., None]:
    """Return an `__init__` whose arguments are the fields of dataclasses, in order.

    Args:
        class_name: for errors.
        configure: called with the new object and an instance of each dataclass.
        groups: the dataclasses; all fields have defaults.
        omitted: names of fields that are not arguments and keep their defaults.
    """
    names = [[field.name for field in dataclasses.fields(group) if field.name not in omitted] for group in groups]
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    for group, own in zip(groups, names, strict=True):
        types = typing.get_type_hints(group)
        parameters += [
            inspect.Parameter(
                name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=getattr(group, name), annotation=types[name]
            )
            for name in own
        ]
    signature = inspect.Signature(parameters, return_annotation=None)

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs).arguments
        values = [{name: given[name] for name in own if name in given} for own in names]
        configure(self, *(group(**own) for group, own in zip(groups, values, strict=True)))

    init.__name__, init.__qualname__ = "__init__", f"{class_name}.__init__"
    init.__signature__ = signature  # type: ignore[attr-defined]
    init.__annotations__ = {**{p.name: p.annotation for p in parameters[1:]}, "return": None}
    return checked_init(class_name, init)


def doc_of_options(summary: str, groups: Sequence[type], omitted: Collection[str] = ()) -> str:
    """Return a class docstring: `summary`, then the entries of the dataclasses' `Attributes:` as `Args:`."""
    entries = {name: text for group in groups for name, text in _entries(group).items() if name not in omitted}
    errors = "ValueError, TypeError: an argument that is invalid regardless of the number of devices."
    return "\n".join([inspect.cleandoc(summary), "", "Args:", *entries.values(), "", "Raises:", f"    {errors}", ""])


def _entries(group: type) -> dict[str, str]:
    """Return {field: its entry under `Attributes:`}, indented by four."""
    section = inspect.cleandoc(group.__doc__ or "").partition("Attributes:\n")[2]
    entries = {match[1]: match[0].rstrip() for match in re.finditer(r"^ {4}(\w+): .*\n?(?:^ {8}.*\n?)*", section, re.M)}
    fields = [field.name for field in dataclasses.fields(group)]
    assert list(entries) == fields, f"{group.__name__} documents {list(entries)} and has {fields}"
    return entries


def _unknown_arguments_text(class_name: str, unknown: list[str], known: list[str]) -> str:
    text = f"{class_name} got the unknown argument{'s' * (len(unknown) > 1)} "
    nearest = {name: difflib.get_close_matches(name, known, n=1) for name in unknown}
    text += ", ".join(repr(name) + "".join(f" (did you mean {each!r}?)" for each in nearest[name]) for name in unknown)
    return text + ("." if all(nearest.values()) else f"; the known arguments are {', '.join(known)}.")
