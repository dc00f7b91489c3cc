"""Cases of tests that `make test` leaves out because others cover each of their options; `make soak` runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def extended_unless(is_kept: Callable[..., bool], cases: Iterable[Any]) -> list[Any]:
    """Mark the cases, tuples or single values, for which `is_kept(*case)` is false as `extended`."""
    found: list[Any] = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        found.append(case if is_kept(*values) else pytest.param(*values, marks=pytest.mark.extended))
    return found


def selected(request: pytest.FixtureRequest, argument: str) -> list[Any]:
    """Return the values of a parametrized argument in the selected tests of the fixture's module.

    A fixture that computes all cases at once leaves out those that no test asks for.
    """
    tests = [each for each in request.session.items if isinstance(each, pytest.Function)]
    parameters = [each.callspec.params for each in tests if each.module is request.module and hasattr(each, "callspec")]
    return list(dict.fromkeys(each[argument] for each in parameters if argument in each))
