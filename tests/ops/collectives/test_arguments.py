"""Invalid arguments raise the class of error that gloo raises, before any communication."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import weft
from support.ranks import on_ranks

Call = Callable[[dist.ProcessGroup, int], object]

# Calls that raise an error on both backends.
ERRORS: dict[str, Call] = {
    "too few outputs": lambda group, n: dist.all_gather([torch.ones(2)] * (n - 1), torch.ones(2), group=group),
    "output of a wrong size": lambda group, n: dist.all_gather_into_tensor(
        torch.ones(2 * n + 1), torch.ones(2), group=group
    ),
    "output of another dtype": lambda group, n: dist.all_gather_into_tensor(
        torch.ones(2 * n, dtype=torch.float64), torch.ones(2), group=group
    ),
    "lists of two dtypes": lambda group, n: dist.all_gather(
        [torch.ones(2, dtype=torch.float64)] * n, torch.ones(2), group=group
    ),
    "too few inputs": lambda group, n: dist.reduce_scatter(torch.ones(2), [torch.ones(2)] * (n - 1), group=group),
    "splits that do not add up": lambda group, n: dist.all_to_all_single(
        torch.ones(4), torch.ones(4), [1] * n, [1] * n, group=group
    ),
    "a dim that ranks do not divide": lambda group, n: dist.all_to_all_single(
        torch.ones(2 * n + 1), torch.ones(2 * n + 1), group=group
    ),
    "a root outside the group": lambda group, n: dist.broadcast(torch.ones(2), n, group=group),
    "a peer outside the group": lambda group, n: dist.send(torch.ones(2), n + 3, group=group),
    "a message to itself": lambda group, n: dist.send(torch.ones(2), dist.get_rank(), group=group),
    "a maximum of sparse tensors": lambda group, n: dist.all_reduce(
        torch.eye(2).to_sparse(), op=dist.ReduceOp.MAX, group=group
    ),
    "not a tensor": lambda group, n: dist.all_reduce([1.0], group=group),
    "bitwise reduction of floats": lambda group, n: dist.all_reduce(torch.ones(2), op=dist.ReduceOp.BXOR, group=group),
    "a product of complex numbers": lambda group, n: dist.all_reduce(
        torch.ones(2, dtype=torch.complex64), op=dist.ReduceOp.PRODUCT, group=group
    ),
}


TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
ERRORS_OF_NEW_GLOO = {"a dim that ranks do not divide"}  # gloo before torch 2.15 accepts such a dim


@on_ranks(2)
@pytest.mark.parametrize("case", ERRORS)
def test_error_classes_match_gloo(rank: int, world_size: int, case: str) -> None:
    classes: list[type] = []
    backends = ["gloo", "cpu:weft"]
    if case in ERRORS_OF_NEW_GLOO and TORCH < (2, 15):
        backends.remove("gloo")
        classes.append(RuntimeError)
    for backend in backends:
        group = dist.new_group(backend=backend)
        with pytest.raises(Exception) as caught:
            ERRORS[case](group, world_size)
        classes.append(type(caught.value))
        ones = torch.ones(2)
        dist.all_reduce(ones, group=group)  # the group remains usable
        assert ones.tolist() == [2.0, 2.0]
    assert classes[0] is classes[1], classes


@on_ranks(2)
def test_error_messages_quote_arguments(rank: int, world_size: int) -> None:
    group = dist.new_group(backend="cpu:weft")
    with pytest.raises(
        RuntimeError, match=r"got 5 elements|of 5 elements for segments of 2 .* one segment for each rank"
    ):
        dist.all_gather_into_tensor(torch.ones(5), torch.ones(2), group=group)
    with pytest.raises(RuntimeError, match="avg for tensors of bool"):
        dist.all_reduce(torch.ones(2, dtype=torch.bool), op=dist.ReduceOp.AVG, group=group)
    with pytest.raises(RuntimeError, match=r"single memory location|overlap"):
        dist.broadcast(torch.ones(1).expand(4), 1 - rank, group=group)


@pytest.mark.parametrize("limit", [-1, 0, True, 1.5, "16"])
def test_invalid_staging_limits_raise(limit: object) -> None:
    with pytest.raises(ValueError, match=r"staging_limit_bytes=.*pass a number of bytes above 0"):
        weft.collectives.BackendOptions(staging_limit_bytes=limit)  # type: ignore[arg-type]


def test_options_of_another_type_raise() -> None:
    with pytest.raises(TypeError, match="got transport=3; pass a function"):
        weft.collectives.BackendOptions(transport=3)  # type: ignore[arg-type]
    store = dist.HashStore()
    creator_options = dist.distributed_c10d._DistributedBackendOptions()
    creator_options.store = store
    with pytest.raises(TypeError, match=r"got pg_options=3 for the backend weft; pass weft\.collectives"):
        weft.collectives._create(creator_options, 3)
