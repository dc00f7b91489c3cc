"""Searches of a configuration in which formats of the states and weights are lists: one for each combination."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from weft.strategy.tuning.result import FoundLayout, Tuning

LISTS = ("optimizer_state", "master_weights")


def combinations_of(config: Any) -> Iterator[dict[str, Any]]:
    """Yield a value for each key whose value is a list, in all combinations; once {} without lists.

    `config`: a mapping; anything else has no lists.

    Raises:
        ValueError: a list is empty.
    """
    known = config if isinstance(config, Mapping) else {}
    lists = {name: known[name] for name in LISTS if isinstance(known.get(name), Sequence)}
    lists = {name: values for name, values in lists.items() if not isinstance(values, str)}
    for name, values in lists.items():
        if not values:
            raise ValueError(f"tune: got no values for {name}; give at least one, such as float32.")
    for values in itertools.product(*lists.values()):
        yield dict(zip(lists, values, strict=True))


def merged(
    searches: Sequence[tuple[dict[str, Any], Tuning]], max_results: int, rejections: Mapping[str, str]
) -> Tuning:
    """Return the result of a search of all combinations.

    Args:
        searches: a combination and its result each.
        rejections: names of combinations that are not valid, with the reasons.
    """
    chosen = [(_with(formats, found), found) for formats, found in searches]
    layouts = sorted((each for found, _ in chosen for each in found.layouts), key=lambda each: each.step_seconds)
    smallest = [found.smallest for found, _ in chosen if found.smallest is not None]
    _, first = searches[0]
    names = {name for formats, _ in searches for name in formats}
    rejected = dict(rejection for _, found in searches for rejection in found.rejections)
    return dataclasses.replace(
        first,
        layouts=tuple(layouts[:max_results]),
        smallest=None if layouts else min(smallest, key=lambda each: each.peak_bytes),
        num_candidates=sum(found.num_candidates for _, found in searches),
        num_above_limit=sum(found.num_above_limit for _, found in searches),
        rejections=(*rejected.items(), *rejections.items()),
        options={name: value for name, value in first.options.items() if name not in names},
        front=front_of(each for found, _ in chosen for each in found.front),
    )


def _with(formats: dict[str, Any], found: Tuning) -> Tuning:
    def add(layout: FoundLayout) -> FoundLayout:
        return dataclasses.replace(layout, formats=formats)

    return dataclasses.replace(
        found,
        layouts=tuple(map(add, found.layouts)),
        front=tuple(map(add, found.front)),
        smallest=None if found.smallest is None else add(found.smallest),
    )


def front_of(layouts: Iterable[FoundLayout]) -> tuple[FoundLayout, ...]:
    """Return the layouts that no other one beats in both time and memory, the fastest first."""
    front: list[FoundLayout] = []
    for layout in sorted(layouts, key=lambda each: (each.step_seconds, each.peak_bytes)):
        if not front or layout.peak_bytes < front[-1].peak_bytes:
            front.append(layout)
    return tuple(front)
