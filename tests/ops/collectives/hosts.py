"""Runs tests on ranks that simulate several hosts."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

import pytest


def across_hosts(*layouts: str) -> Callable[[Callable[..., None]], Any]:
    """Run a test of `on_ranks` once per layout, a string in which the letter of each rank names the rank's host.

    Groups of the weft backend that the test creates use these hosts.
    """

    def decorate(body: Callable[..., None]) -> Any:
        @functools.wraps(body)
        def run_on_host(*, hosts: str, rank: int, **kwargs: object) -> None:
            os.environ["WEFT_HOST_ID"] = hosts[rank]
            try:
                body(rank=rank, **kwargs)
            finally:
                del os.environ["WEFT_HOST_ID"]

        parameters = list(inspect.signature(body).parameters.values())
        hosts = inspect.Parameter("hosts", inspect.Parameter.KEYWORD_ONLY)
        run_on_host.__signature__ = inspect.Signature([*parameters, hosts])  # type: ignore[attr-defined]
        return pytest.mark.parametrize("hosts", layouts)(run_on_host)

    return decorate
