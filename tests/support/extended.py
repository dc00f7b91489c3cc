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
