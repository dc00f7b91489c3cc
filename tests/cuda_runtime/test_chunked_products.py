"""The number of matrix products of chunked sequence-parallel operators, on the runtime without a device."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ops.on_device import world_on
from ops.overlapping import overlapping
from torch import Tensor

import weft
from support import cuda_runtime
from support.ranks import on_ranks

pytestmark = pytest.mark.cuda_runtime
NUM_CHUNKS = 2  # a shard of 8 rows in chunks of 4


class Products:
    """Counts the matrix products of this process."""

    def __init__(self) -> None:
        self._before = self._count()

    @staticmethod
    def _count() -> dict[str, int]:
        def count(name: str) -> int:
            return cuda_runtime.count(f"operator aten::{name}") + cuda_runtime.count(f"operator aten::{name}_")

        return {name: count(name) for name in ("mm", "addmm", "bmm", "baddbmm")}

    def since_last_call(self) -> dict[str, int]:
        """Return the number of products by operator since the last call, or since this object was made."""
        before, self._before = self._before, self._count()
        return {name: count - before[name] for name, count in self._before.items() if count != before[name]}


def _check(rank: int, num_rows: int, expected: dict[str, list[dict[str, int]]]) -> None:
    """Compare the products of each operator's forward, and of its backward, with the expected ones."""
    group = dist.group.WORLD.group_name
    full = torch.randn(num_rows, 6)
    x = full.chunk(dist.get_world_size())[rank].requires_grad_()
    full.requires_grad_()
    up, down, gate = (torch.randn(size, requires_grad=True) for size in ((5, 6), (6, 5), (5, 6)))
    column = {"gather_dim": 0, "group_name": group, "dim_size": num_rows}
    mlp = {"activation": "silu", "group_name": group, "sequence_dim": 0, "sequence_size": num_rows}

    def run(name: str) -> Tensor:
        if name == "column":
            return weft.ops.all_gather_linear(x, up, **column)
        if name == "column with bias":
            return weft.ops.all_gather_linear(x, up, up[:, 0], **column)
        if name == "column, gradient of x":
            return weft.ops.all_gather_linear(x, up.detach(), **column)
        if name == "row":
            return weft.ops.linear_reduce_scatter(full, gate, scatter_dim=0, group_name=group)
        return weft.ops.column_row_mlp(x, up, down, gate, **mlp)

    for name, (forward, backward) in expected.items():
        products = Products()
        y = run(name)
        assert products.since_last_call() == forward, name
        y.backward(torch.ones_like(y))
        assert products.since_last_call() == backward, name


@on_ranks(2, 3)
def test_a_chunk_of_all_ranks_is_one_product(rank: int, world_size: int) -> None:
    torch.cuda.set_device(rank)
    sums = {"mm": 1, "addmm": NUM_CHUNKS - 1}  # the products of a weight's gradient
    with world_on("cpu:weft,cuda:nccl"), torch.device("cuda"), overlapping("always"):
        expected = {
            "column": [{"bmm": NUM_CHUNKS}, {"mm": NUM_CHUNKS + sums["mm"], "addmm": sums["addmm"]}],
            "column with bias": [{"addmm": NUM_CHUNKS}, {"mm": NUM_CHUNKS + sums["mm"], "addmm": sums["addmm"]}],
            "column, gradient of x": [{"bmm": NUM_CHUNKS}, {"bmm": NUM_CHUNKS}],
            "row": [{"bmm": NUM_CHUNKS}, {"bmm": NUM_CHUNKS} | sums],
            # w1, w3 and w2 in each chunk; the backward is unchunked.
            "mlp": [{"mm": 3 * NUM_CHUNKS}, {"mm": 5, "addmm": 1}],
        }
        _check(rank, 8 * world_size, expected)


@on_ranks(3)
def test_a_shard_that_ends_in_a_chunk_adds_a_product(rank: int) -> None:
    """The last of three shards has two of the four rows of the second chunk."""
    torch.cuda.set_device(rank)
    with world_on("cpu:weft,cuda:nccl"), torch.device("cuda"), overlapping("always"):
        expected = {
            "column": [{"bmm": 2, "mm": 1}, {"mm": 4, "addmm": 2}],
            "column, gradient of x": [{"bmm": 2, "mm": 1}, {"bmm": 2, "mm": 1}],
            "row": [{"bmm": 2, "mm": 1}, {"bmm": 2, "mm": 2, "addmm": 2}],
            "mlp": [{"mm": 9}, {"mm": 5, "addmm": 1}],
        }
        _check(rank, 8 + 8 + 6, expected)
