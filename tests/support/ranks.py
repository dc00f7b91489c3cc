"""Run a test's body on every rank of a warm process group.

    @on_ranks(1, 2, 4)
    @pytest.mark.parametrize("dtype", ["float32", "float64"])
    def test_mlp(rank: int, world_size: int, dtype: str) -> None:
        ...  # runs on every rank; asserts count on every rank

Arguments (parameters, values of fixtures) are pickled. Fixtures themselves run in the test process.
"""

from __future__ import annotations

import functools
import inspect
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.rank_pool import POOLS, Case, RankFailure, RanksSkipped

__all__ = ["RankFailure", "on_ranks", "run_on_ranks"]

DEFAULT_SECONDS = 120.0
_GIVEN_BY_RANK = ("rank", "world_size")


def on_ranks(
    *world_sizes: int, timeout: float = DEFAULT_SECONDS, keeps_groups: bool = False
) -> Callable[[Callable[..., None]], Any]:
    """Make one test per world size from a body that takes `rank` and/or `world_size`.

    The test fails if any rank fails, dies, or needs more than `timeout` seconds. It is skipped if every rank calls
    pytest.skip. After a failure the next test gets fresh ranks. `keeps_groups`: see `run_on_ranks`.
    """
    if not world_sizes or not all(isinstance(size, int) for size in world_sizes):
        raise TypeError(f"on_ranks takes world sizes, not {world_sizes}; write for example @on_ranks(1, 2)")

    def decorate(body: Callable[..., None]) -> Any:
        parameters = inspect.signature(body).parameters
        wanted = tuple(name for name in _GIVEN_BY_RANK if name in parameters)

        @functools.wraps(body)
        def test(*args: object, world_size: int, **kwargs: object) -> None:
            try:
                POOLS.get(world_size).run(_case(body, kwargs, wanted, keeps_groups), timeout)
            except RankFailure as failure:
                text = str(failure)
            except RanksSkipped as skip:
                raise pytest.skip.Exception(str(skip), _use_item_location=True) from None
            else:
                return
            pytest.fail(text, pytrace=False)

        parameters_of_test = [p for name, p in parameters.items() if name not in _GIVEN_BY_RANK]
        size = inspect.Parameter("world_size", inspect.Parameter.KEYWORD_ONLY)
        test.__signature__ = inspect.Signature([*parameters_of_test, size])  # type: ignore[attr-defined]
        test.rank_body = body  # type: ignore[attr-defined]
        return pytest.mark.parametrize("world_size", world_sizes, ids=lambda n: f"{n}ranks")(test)

    return decorate


def run_on_ranks(
    world_size: int,
    function: Callable[..., object] | str,
    *,
    timeout: float = DEFAULT_SECONDS,
    keeps_groups: bool = False,
    **kwargs: object,
) -> list[Any]:
    """Call `function(rank=..., world_size=..., **kwargs)` on every rank; return the results by rank.

    keeps_groups: keep the sub-groups of this case for the next case on these ranks. The next case may use the same
        meshes, for which DTensor has cached the placements of each operator's result.

    `function` is a function at a module's top level, which gets `rank` and `world_size` if it takes them, or
    "path/to/file.py::name", which always gets both. Results are pickled. Raises RankFailure.
    """
    if isinstance(function, str):
        path, separator, name = function.partition("::")
        if not separator or not Path(path).is_file():
            raise ValueError(f"{function!r} names no function of a file; write 'path/to/file.py::name'")
        source, arguments = str(Path(path).resolve()), pickle.dumps(kwargs)
        case = Case(source, Path(path).stem, name, arguments, _GIVEN_BY_RANK, keeps_groups)
    else:
        body = getattr(function, "rank_body", function)
        parameters = inspect.signature(body).parameters
        case = _case(body, kwargs, tuple(name for name in _GIVEN_BY_RANK if name in parameters), keeps_groups)
    try:
        return POOLS.get(world_size).run(case, timeout)
    except RanksSkipped as skip:
        pytest.skip(str(skip))


def _case(
    body: Callable[..., object], kwargs: dict[str, object], wanted: tuple[str, ...], keeps_groups: bool = False
) -> Case:
    if "<locals>" in body.__qualname__ or "<lambda>" in body.__qualname__:
        raise ValueError(f"ranks cannot find {body.__qualname__!r} by its name; move it to the top level of its module")
    for name, value in kwargs.items():
        try:
            pickle.dumps(value)
        except Exception as error:
            raise ValueError(
                f"{body.__qualname__} gets {name}={value!r}, which cannot be sent to ranks ({error}); "
                "pass a plain value and build the object in the body"
            ) from error
    return Case(
        str(Path(inspect.getfile(inspect.unwrap(body))).resolve()),
        body.__module__,
        body.__qualname__,
        pickle.dumps(kwargs),
        wanted,
        keeps_groups,
    )
